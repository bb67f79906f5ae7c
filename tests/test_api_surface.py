"The public names against the project's reference pages."
import ast, dataclasses, inspect, re, typing
from pathlib import Path
from typing import Any, Literal
import pytest
from veloxquant_mlx.cache import options as options_module
from veloxquant_mlx.cache.base import KVCacheBuilder, KVCacheConfig, KVCacheFactory, STANDALONE_METHODS
from veloxquant_mlx.core.abstractions import ArtifactStore
from veloxquant_mlx.core.fields import Options
from veloxquant_mlx.engine.base import CompressedCache
from veloxquant_mlx.engine.registry import methods

# --- what the pages say

folder = Path(__file__).parent/'reference'
page, table = [(folder/o).read_text() for o in ('cache_base_page.txt', 'options_table.md')]

def between(a, b): return page.split(a, 1)[1].split(b, 1)[0]

def signature(text):
    "name → source of the default, None without one, of `(a, b=1)`"
    args = ast.parse(f"def f({text.replace('<factory>', '[]')}): pass").body[0].args
    names, n = [o.arg for o in args.args], len(args.args)-len(args.defaults)
    return {o: None if i<n else ast.unparse(args.defaults[i-n]) for i,o in enumerate(names)}

SIGNATURE = signature(re.search(r'^class veloxquant_mlx\.cache\.base\.KVCacheConfig\((.*)\)$', page, re.M)[1])
TYPES = dict(re.findall(r'^(\w+): (.+?)(?: = .+)?$', between('• fused_sdpa_memory_bound (bool)', 'class veloxquant_mlx.cache.base.KVCacheFactory'), re.M))
DEFAULTS = {k: ast.literal_eval(v) for k,v in SIGNATURE.items()}
def type_of(name): return eval(TYPES[name], dict(Literal=Literal, Any=Any, ArtifactStore=ArtifactStore))

METHODS = list(typing.get_args(type_of('method')))
BUILDER = {k: signature(v) for k,v in re.findall(r'^(?:static )?(\w+)\((.*)\)$', between('class veloxquant_mlx.cache.base.KVCacheBuilder', '\x00'), re.M)}
FACTORY = {k: signature(v) for k,v in re.findall(r'^static (\w+)\((.*)\)$', between('class veloxquant_mlx.cache.base.KVCacheFactory', 'class veloxquant_mlx.cache.base.KVCacheBuilder'), re.M)}

@dataclasses.dataclass
class Row:
    method:str; options:str; parent:str; own:list; family:str; base:str; paper:str; standalone:bool
def row(line):
    method, cls, own, family, base, paper, standalone = (o.strip() for o in line.strip('|\n ').split('|'))
    name, parent = re.fullmatch(r'`(\w+)(?:\((\w+)\))?`', cls).groups()
    return Row(method, name, parent, re.findall(r'`(\w+)`', own), family, base, paper, standalone=='yes')
ROWS = {o.method: o for o in map(row, re.findall(r'^\| \w+ \| `.*$', table, re.M))}
CORE = re.findall(r'`(\w+)`', re.search(r'^Core fields, in reference order: (.*)$', table, re.M)[1])
SHARED = re.findall(r'`(\w+)`', re.search(r'^Shared fields[^:]*: (.*)$', table, re.M)[1])
OWNER = {f: o.method for o in ROWS.values() for f in o.own}

def test_the_pages_are_read_whole():
    assert len(METHODS)==len(ROWS)==43 and len(SIGNATURE)==225 and len(CORE)==17 and len(SHARED)==5
    assert set(SIGNATURE)==set(TYPES)=={*CORE, *SHARED, *OWNER} and list(SIGNATURE)==list(TYPES) and len(OWNER)==225-17-5
    assert set(METHODS)==set(ROWS) and list(FACTORY)==['create'] and len(BUILDER)==17 and [*BUILDER][-2:]==['build','for_model']

# --- methods

@pytest.mark.parametrize('name', METHODS)
def test_method(name):
    "Registered as the table says"
    m, r = methods()[name], ROWS[name]
    assert (m.name, m.options.__name__, m.family, m.standalone)==(name, r.options, r.family, r.standalone)
    source = re.match(r'(arXiv|OpenReview):\S+', r.paper)
    assert m.paper==(source[0] if source else '')
    assert KVCacheConfig(method=name).method==name

def test_methods_come_in_order():
    "Those of the page first, in its order; methods that it does not know follow"
    known, names = [o for o in METHODS if o in methods()], list(methods())
    assert known==METHODS==names[:len(known)] and list(typing.get_args(fields['method'].type))==names

@pytest.mark.parametrize('name', [o.method for o in ROWS.values() if o.standalone])
def test_standalone_method(name): assert name in STANDALONE_METHODS

def test_standalone_methods():
    assert type(STANDALONE_METHODS) is frozenset and STANDALONE_METHODS<={o.method for o in ROWS.values() if o.standalone}
    for m in methods().values(): assert m.standalone != issubclass(m.cache_class, CompressedCache)

# --- fields

fields = {f.name: f for f in dataclasses.fields(KVCacheConfig)}
parameters = inspect.signature(KVCacheConfig).parameters

@pytest.mark.parametrize('name', SIGNATURE)
def test_field(name):
    "Default, of the very type, and annotation"
    f, want = fields[name], DEFAULTS[name]
    got = f.default if f.default is not dataclasses.MISSING else f.default_factory()
    assert got==want and type(got) is type(want)
    assert parameters[name].default==f.default or f.default is dataclasses.MISSING
    if name=='method': assert typing.get_origin(f.type) is Literal
    else: assert f.type==type_of(name)
    value = getattr(KVCacheConfig(), name)
    assert value==want and type(value) is type(want)

def test_fields_come_in_order():
    assert list(fields)==list(parameters)
    assert [o for o in fields if o in SIGNATURE]==[o for o in SIGNATURE if o in fields]

def test_every_field_has_an_owner():
    others = {f.name for n,m in methods().items() if n not in METHODS for f in dataclasses.fields(m.options)}
    assert set(fields)<=set(SIGNATURE)|others

def test_each_configuration_has_its_own_list():
    KVCacheConfig().observers.append(1)
    assert KVCacheConfig().observers==[]

def test_positional_arguments():
    c = KVCacheConfig('kivi', 64, 4)
    assert (c.method, c.head_dim, c.bit_width_inlier)==('kivi', 64, 4)

# --- options

@pytest.mark.parametrize('name', METHODS)
def test_options(name):
    "The class of the table, with the fields it owns and those of the class it extends, as on the page"
    r = ROWS[name]
    cls = getattr(options_module, r.options)
    assert cls is methods()[name].options and dataclasses.is_dataclass(cls) and issubclass(cls, Options)
    inherited = next(o.own for o in ROWS.values() if o.options==r.parent) if r.parent else []
    assert [f.name for f in dataclasses.fields(cls)]==inherited+r.own
    assert issubclass(cls, getattr(options_module, r.parent)) if r.parent else True
    assert r.own==[o for o in SIGNATURE if OWNER.get(o)==name]
    for f in dataclasses.fields(cls):
        assert f.default==DEFAULTS[f.name] and type(f.default) is type(DEFAULTS[f.name]) and f.type==type_of(f.name)
        assert f.metadata['doc']
    KVCacheConfig(method=name, options=cls())

def test_options_module_has_nothing_else():
    assert {k for k,v in vars(options_module).items() if isinstance(v, type) and issubclass(v, Options)}=={m.options.__name__ for m in methods().values()}
    assert set(options_module.__all__)>={m.options.__name__ for m in methods().values()}

# --- factory and builder

def of(f): return {k: None if p.default is p.empty else repr(p.default) for k,p in inspect.signature(f).parameters.items() if k!='self'}

@pytest.mark.parametrize('cls,name,want', [pytest.param(c, k, v, id=f'{c.__name__}.{k}') for c,d in ((KVCacheFactory, FACTORY), (KVCacheBuilder, BUILDER)) for k,v in d.items()])
def test_signature(cls, name, want):
    "Names and defaults of the parameters; static where the page says so"
    assert of(getattr(cls, name))==want
    assert isinstance(vars(cls)[name], staticmethod)==(name in ('create','for_model')) and getattr(cls, name).__doc__

def test_no_other_public_member(): assert {o for c in (KVCacheFactory, KVCacheBuilder) for o in vars(c) if o[0]!='_'}=={*FACTORY, *BUILDER}

def test_builder_is_fluent():
    "Every `with_` method returns the builder"
    values = dict(with_method='kivi', with_head_dim=64, with_bit_width=4, with_jl_dim=8, with_n_outlier_channels=2, with_n_calib_tokens=64, with_seed=1,
        with_precision=None, with_capacity=99, with_artifact_store=None, with_observer=None, with_sliding_window=9)
    for name in BUILDER:
        if not name.startswith('with_'): continue
        b = KVCacheBuilder()
        assert getattr(b, name)(*[values[name]] if name in values else []) is b, name

def test_builder_sets_the_fields():
    c = (KVCacheBuilder().with_method('kivi').with_head_dim(64).with_bit_width(4).with_jl_dim(32).with_n_outlier_channels(3).with_n_calib_tokens(40)
        .with_vectorized_attend(False).with_outlier_two_stream().with_fused_query_dot().with_seed(7).with_capacity(1000).with_sliding_window(100).build())
    got = {k: getattr(c.config, k) for k in ('head_dim','bit_width_inlier','jl_dim','n_outlier_channels','n_calib_tokens','enable_vectorized_attend',
        'enable_outlier_two_stream','enable_fused_query_dot','seed','capacity','sliding_window')}
    assert list(got.values())==[64, 4, 32, 3, 40, False, True, True, 7, 1000, 100] and c.method=='kivi'

@pytest.mark.parametrize('name', ['turboquant_prod'])
def test_example_of_the_page(name):
    code = re.search(r'^Example:\n\n(cache = \(.*?\n\))', page, re.M|re.S)[1]
    scope = dict(KVCacheBuilder=KVCacheBuilder)
    exec(code, scope)
    assert len(scope['cache'])==0
