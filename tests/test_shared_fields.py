"The fields that methods share: legal ranges, which ways of setting a field warn, options objects, and lists of widths for the layers of a model."
import dataclasses, re, warnings
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache
from tiny_models import tiny
from veloxquant_mlx.cache.base import KVCacheBuilder, KVCacheConfig, KVCacheFactory, own_fields
from veloxquant_mlx.core.abstractions import ArtifactStore, QuantizationObserver
from veloxquant_mlx.core.errors import QuantizerConfigError
from veloxquant_mlx.core.settings import CacheSettings
from veloxquant_mlx.engine.layers import describe
from veloxquant_mlx.engine.registry import methods

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning') # those that matter are caught

METHODS = methods()
SERVABLE = {k: m for k,m in METHODS.items() if not m.standalone}
LISTS = {k: m.cache_class for k,m in SERVABLE.items() if m.cache_class.bit_field} # methods with a width for each layer

class Store(ArtifactStore):
    def load(self, key): return None
    def save(self, key, arrays): pass
class Observer(QuantizationObserver):
    def on_event(self, event): pass

def refused(field, value, make=KVCacheConfig, **kw):
    "`make(**kw)` raises a `QuantizerConfigError` of one line that begins with the field and has the value"
    with pytest.raises(QuantizerConfigError) as e: make(**kw)
    text = str(e.value)
    assert text.startswith(f'{field} must') and repr(value) in text and '\n' not in text, text
    return text

# --- ranges

def whole(*out, none=True): return [*out, 2.5, 64.0, float('nan'), True, False, np.float32(3), '4', [4], (4,), {}, *([] if none else [None])]
def flag(none=False): return [0, 1, 'yes', '', [], *([] if none else [None])]

BAD = dict(
    head_dim=whole(1, 0, -64, none=False),
    bit_width_inlier=[o for o in whole(0, -1, none=False) if o!=[4]]+[[], [2, 2.5], [2, '4'], [2, None], [2, True], [[2]], (2, 4)],
    bit_width_outlier=whole(0, -1, 9, 64),
    jl_dim=whole(0, -1), n_outlier_channels=whole(-1), n_calib_tokens=whole(0, -5), seed=whole(-1, none=False),
    enable_vectorized_attend=flag(), enable_outlier_two_stream=flag(), enable_fused_query_dot=flag(), fused_sdpa_memory_bound=flag(),
    use_metal_kernels=flag(none=True), fused_sdpa=flag(none=True),
    dtype=[mx.int32, mx.uint8, mx.bool_, mx.complex64, 'float16', 'fp16', np.float16, float, 16, mx.array(1.)],
    capacity=whole(0, -1), sliding_window=whole(0, -1), fused_sdpa_max_ctx=whole(0, -1), residual_length=whole(-1, -128, none=False),
    store=['store', 1, {}, Store, True], observers=[None, print, (), Observer(), {}, [print], [None], [Observer], [Observer(), 1]],
    method=[None, 3, '', 'KIVI', 'kivi ', 'fp16', b'kivi', ['kivi'], {}])
LEGAL = dict(
    head_dim=[2, 80, 96, 256, np.int64(64)], bit_width_inlier=[2, 3, 4, 8, [2], [2,4,8], np.int32(4)], bit_width_outlier=[None], jl_dim=[None, 1, 4096],
    n_outlier_channels=[None, 0, 5], n_calib_tokens=[None, 32, 100_000], seed=[0, 2**31], enable_vectorized_attend=[True, False],
    enable_outlier_two_stream=[False], enable_fused_query_dot=[True, False], fused_sdpa_memory_bound=[True, False], use_metal_kernels=[None, True, False],
    fused_sdpa=[None, True, False], dtype=[None, mx.float16, mx.bfloat16, mx.float32], capacity=[None, 1, 10**9], sliding_window=[None, 1, 10**6],
    fused_sdpa_max_ctx=[None, 1], residual_length=[32, 128, 4096], store=[None, Store()], observers=[[], [Observer()], [Observer(), Observer()]])

def test_every_field_has_values_here():
    assert set(BAD)=={f.name for f in dataclasses.fields(CacheSettings)}|{'method'} and set(LEGAL)|{'method'}==set(BAD)

def each(table):
    "Named without addresses, which differ between the processes of one run"
    return pytest.mark.parametrize('field,value', [pytest.param(k, v, id=f'{k}='+re.sub(' object at 0x[0-9a-f]+', '', repr(v))) for k,d in table.items() for v in d])

@each(BAD)
def test_illegal_value(field, value):
    "For every method, whether it reads the field or not"
    for m in METHODS if field!='method' else [None]:
        shown = next(o for o in value if not isinstance(o, Observer)) if field=='observers' and type(value) is list else value # the one that is none
        refused(field, shown, **({} if m is None else dict(method=m))|{field: value})

@each(LEGAL)
def test_legal_value(field, value):
    "Stored as given; it makes a cache whose state can be saved"
    c = KVCacheConfig(**{field: value})
    assert getattr(c, field) is value or getattr(c, field)==value
    if isinstance(value, list) and field=='bit_width_inlier' or value is True and field=='use_metal_kernels': return
    cache = KVCacheFactory.create(c)
    assert cache.state and getattr(cache.config, field)==value
    again = type(cache).from_state(cache.state)
    assert getattr(again.config, field)==dict(observers=[], store=None).get(field, value) # these two are not saved

def test_fields_that_a_method_does_not_read_have_no_effect():
    for m in SERVABLE:
        c = KVCacheConfig(method=m, jl_dim=3, enable_vectorized_attend=False, enable_fused_query_dot=True, n_outlier_channels=7)
        assert KVCacheFactory.create(c).method==m

def test_message_names_the_rule():
    for kw,text in ((dict(seed=-1), 'seed must be >= 0 (got -1)'), (dict(head_dim=1), 'head_dim must be >= 2 (got 1)'), (dict(capacity=0), 'capacity must be >= 1 (got 0)')):
        with pytest.raises(QuantizerConfigError) as e: KVCacheConfig(**kw)
        assert str(e.value)==text
    assert all(o in refused('method', 'kiwi', method='kiwi') for o in METHODS)
    assert issubclass(QuantizerConfigError, ValueError)

def test_values_are_checked_when_they_are_given_by_position(): refused('head_dim', 0, lambda: KVCacheConfig('kivi', 0))
def test_a_replaced_value_is_checked(): refused('seed', -1, lambda: dataclasses.replace(KVCacheConfig(), seed=-1))
def test_an_unknown_field_is_named():
    with pytest.raises(TypeError, match='kivi_groups'): KVCacheConfig(kivi_groups=32)

@pytest.mark.parametrize('method', LISTS)
def test_width_of_a_method(method):
    "`bit_width_inlier` of a method that has its width there takes its widths only, others ignore it"
    c = LISTS[method]
    for b in range(1, 17):
        if c.bit_field!='bit_width_inlier' or b in c.bit_widths: assert KVCacheConfig(method=method, bit_width_inlier=b).bit_width_inlier==b
        else: assert method in refused('bit_width_inlier', b, method=method, bit_width_inlier=b)

def own(method, **kw): return METHODS[method].options(**kw)

@pytest.mark.parametrize('method,field,value,kw', [
    ('kivi', 'residual_length', 0, {}), ('kivi', 'residual_length', 100, {}), ('kivi', 'residual_length', 31, {}),
    ('kivi_sink', 'residual_length', 100, {}), ('kivi_sink', 'n_sink_tokens', 32, dict(residual_length=32)),
    ('zipcache', 'zipcache_hi_bits', 1, {}), ('amc', 'amc_k_mid', .9, {}), ('amc', 'amc_calib_variance', None, dict(amc_adaptive_thresholds=True)),
    ('kitty', 'residual_length', 0, {}), ('kitty', 'residual_length', 100, {}), ('kvquant', 'n_calib_tokens', 31, {}), ('skvq', 'n_calib_tokens', 31, {}), ('turboquant_rvq', 'bit_width_outlier', 4, {}),
    ('turboquant_rvq', 'bit_width_outlier', 7, dict(enable_outlier_two_stream=True, n_outlier_channels=4)),
    ('turboquant_rvq', 'n_outlier_channels', None, dict(enable_outlier_two_stream=True)),
    ('turboquant_rvq', 'n_outlier_channels', 0, dict(enable_outlier_two_stream=True)),
    ('turboquant_rvq', 'n_outlier_channels', 128, dict(enable_outlier_two_stream=True))])
def test_rules_that_join_fields(method, field, value, kw): refused(field, value, method=method, **{field: value}, **kw)

@pytest.mark.parametrize('field,value,kw', [('head_dim', 96, {}), ('jl_dim', 65, dict(head_dim=64)), ('n_outlier_channels', 64, dict(head_dim=64))])
def test_rules_of_the_builder(field, value, kw):
    b = KVCacheBuilder()
    b._fields = {field: value}|kw
    refused(field, value, b.build)

# --- warnings

def warned(make):
    "Messages of the warnings that `make` gives"
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter('always')
        make()
    assert all(o.category is DeprecationWarning and o.filename==__file__ for o in log)
    return [str(o.message) for o in log]

OWN = [(m, f) for m in METHODS.values() for f in own_fields(m.options)]

@pytest.mark.parametrize('method,field', [pytest.param(m, f, id=f.name) for m,f in OWN])
def test_a_method_field_set_directly_warns(method, field):
    "Once, at the caller's line, naming the field and the options class that owns it, for the default too; and works"
    text, = warned(lambda: KVCacheConfig(method=method.name, **{field.name: field.default}))
    assert field.name in text and method.options.__name__ in text
    assert getattr(KVCacheConfig(method=method.name, **{field.name: field.default}), field.name)==field.default

def test_the_value_set_directly_is_used():
    c = KVCacheConfig(method='kivi', kivi_group_size=64)
    assert c.kivi_group_size==KVCacheFactory.create(c).config.kivi_group_size==64
    refused('kivi_group_size', 4, method='kivi', kivi_group_size=4)

def test_a_field_of_another_method_warns_and_is_checked():
    assert len(warned(lambda: KVCacheConfig(method='kivi', kvquant_bits=4, gear_bits=4)))==2
    refused('kvquant_bits', 9, method='kivi', kvquant_bits=9)

@pytest.mark.parametrize('method', METHODS)
def test_options_do_not_warn(method):
    assert warned(lambda: KVCacheConfig(method=method, options=METHODS[method].options()))==[]

def test_core_and_shared_fields_do_not_warn():
    given = {f.name: f.default if f.default is not dataclasses.MISSING else [] for f in dataclasses.fields(CacheSettings)}
    assert warned(lambda: KVCacheConfig(method='kivi', options=None, **given))==[]
    assert warned(lambda: KVCacheConfig('kivi', 64, 4))==[]

def test_nothing_else_warns():
    "Copies, changed copies, caches and layers are made from the fields again, which nobody set directly"
    c = KVCacheConfig(method='kivi', options=own('kivi', kivi_group_size=64))
    model = tiny('llama')
    assert warned(lambda: dataclasses.replace(c, seed=3))==[]
    assert warned(lambda: KVCacheFactory.create(c))==warned(lambda: KVCacheBuilder.for_model(model, c))==[]
    assert warned(lambda: KVCacheBuilder().with_method('kivi').with_head_dim(64).build())==[]

# --- options

@pytest.mark.parametrize('method', METHODS)
def test_options_are_an_object_of_the_very_class(method):
    cls = METHODS[method].options
    class Sub(cls): pass
    others = [m.options() for k,m in METHODS.items() if k!=method]
    for wrong in [*others, Sub(), cls, {}, dataclasses.asdict(cls()), method, 3, True, [cls()]]:
        with pytest.raises(QuantizerConfigError) as e: KVCacheConfig(method=method, options=wrong)
        assert str(e.value).startswith('options must') and cls.__name__ in str(e.value) and type(wrong).__name__ in str(e.value)

def test_values_of_options_win():
    "Over fields that are set directly, which still warn"
    make = lambda: KVCacheConfig(method='kivi', kivi_group_size=16, options=own('kivi', kivi_group_size=64))
    assert make().kivi_group_size==64 and len(warned(make))==1
    assert KVCacheConfig(method='kivi', kivi_group_size=16, options=own('kivi')).kivi_group_size==32
    assert KVCacheFactory.create(make()).config.kivi_group_size==64

def test_options_of_the_method_leave_other_fields_alone():
    c = KVCacheConfig(method='kivi', options=own('kivi', kivi_group_size=64))
    rest = KVCacheConfig(method='kivi')
    assert [f.name for f in dataclasses.fields(c) if getattr(c, f.name)!=getattr(rest, f.name)]==['options','kivi_group_size']

@pytest.mark.parametrize('method,field', [pytest.param(m, f, id=f.name) for m,f in OWN if any(f.metadata[o] is not None for o in ('ge','gt','le','lt','choices'))])
def test_ranges_of_options(method, field):
    "Just outside of each bound; the options object itself refuses"
    m = field.metadata
    unit = 1 if field.type in (int, int|None) else 1e-6
    wrong = [m['ge']-unit if m['ge'] is not None else m['gt'], m['le']+unit if m['le'] is not None else m['lt'], 'no such choice' if m['choices'] else None]
    for v in [*(o for o in wrong if o is not None), 'text', [], object, float('nan'), float('inf')]: refused(field.name, v, method.options, **{field.name: v})

def test_rules_that_join_options_and_fields():
    refused('residual_length', 128, method='kivi', options=own('kivi', kivi_group_size=48))
    refused('kvquant_refit_interval', 100, method='kvquant', options=own('kvquant', kvquant_refit_interval=100))

def test_options_changed_later_do_not_change_the_configuration():
    o = own('kivi')
    c = KVCacheConfig(method='kivi', options=o)
    o.kivi_group_size = 64
    assert c.kivi_group_size==32 and KVCacheFactory.create(c).config.kivi_group_size==32

# --- a width for each layer

ALONE = dict(xkv=dict(xkv_group_size=1), xquant=dict(xquant_group_size=1, xquant_group_quant_size=16)) # layers that share have one width, and heads of these models are small
def config(method, widths, **kw): return KVCacheConfig(method=method, bit_width_inlier=widths, options=own(method, **ALONE.get(method, {})), **kw)
def of_layers(method, caches): return [c.width for c in caches if hasattr(c, 'config')] # which the field need not be: kvtc has bits of a token

@pytest.mark.parametrize('method', LISTS)
def test_widths_of_layers(method):
    "Element i is the width of layer i; the table shows it"
    b = list(LISTS[method].bit_widths)
    widths = [b[-1], b[1], b[2%len(b)]]
    caches = KVCacheBuilder.for_model(tiny('llama'), config(method, widths))
    assert of_layers(method, caches)==widths
    assert all(f'{w} bits' in r['details'] for w,r in zip(widths, describe(caches), strict=True))
    for c,w in zip(caches, widths):
        again = type(c).from_state(c.state)
        assert of_layers(method, [again])==[w] and not isinstance(c.config.bit_width_inlier, list)

@pytest.mark.parametrize('method', [k for k,c in LISTS.items() if METHODS[k].family=='cross_layer'])
def test_layers_that_share_have_one_width(method):
    "Layers of a group; the last of three layers is alone"
    group, fields = LISTS[method].group_field, ALONE.get(method, {})
    model, make = tiny('llama'), lambda widths: KVCacheBuilder.for_model(model, KVCacheConfig(method=method, bit_width_inlier=widths, options=own(method, **fields|{group: 2})))
    b = list(LISTS[method].bit_widths)
    assert of_layers(method, make([b[1],b[1],b[0]]))==[b[1],b[1],b[0]]
    with pytest.raises(QuantizerConfigError, match=r'^bit_width_inlier must be equal in layers 0, 1, which share \(got') as e: make([b[1],b[0],b[0]])
    assert str([b[1],b[0]]) in str(e.value)

@pytest.mark.parametrize('method', LISTS)
@pytest.mark.parametrize('n', [1,2,4,30])
def test_wrong_number_of_widths(method, n):
    "The message has the right one"
    with pytest.raises(QuantizerConfigError) as e: KVCacheBuilder.for_model(tiny('llama'), config(method, [2]*n))
    assert str(e.value).startswith('bit_width_inlier must have 3 ') and str(n) in str(e.value)

@pytest.mark.parametrize('method', LISTS)
@pytest.mark.parametrize('widths', [[], [2,2.0,2], [2,'2',2], [2,None,2], [2,True,2], [2,[2],2], (2,2,2), '222', np.array([2,2,2])], ids=repr)
def test_mixed_types(method, widths):
    with pytest.raises(QuantizerConfigError) as e: KVCacheBuilder.for_model(tiny('llama'), config(method, widths))
    assert str(e.value).startswith('bit_width_inlier must') and repr(widths) in str(e.value)

@pytest.mark.parametrize('method', LISTS)
def test_widths_out_of_range(method):
    "Refused when the configuration is made, by the element"
    for w in [0, -1, max(LISTS[method].bit_widths)+1, 100, *(set(range(1, 9))-set(LISTS[method].bit_widths))]:
        assert method in refused('bit_width_inlier', w, method=method, bit_width_inlier=[2,w,2])

@pytest.mark.parametrize('method', LISTS)
def test_a_list_is_for_models(method):
    refused('bit_width_inlier', [2,2], lambda: KVCacheFactory.create(config(method, [2,2])))
    refused('bit_width_inlier', [2,2], KVCacheBuilder().with_method(method).with_bit_width([2,2]).build)

@pytest.mark.parametrize('method', [k for k in METHODS if k not in LISTS])
def test_methods_without_widths_of_layers_refuse_a_list(method):
    assert method in refused('bit_width_inlier', [2,2,2], method=method, bit_width_inlier=[2,2,2])

@pytest.mark.parametrize('name', ['gemma3', 'qwen3_next', 'falcon_h1'])
def test_elements_belong_to_layers_with_attention(name):
    "Also to those that keep the model's own cache; not to recurrent ones"
    model, method = tiny(name), next(iter(LISTS))
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method=method))
    flat = lambda c: list(c.caches) if type(c) is CacheList else [c]
    with_attention = [i for i,c in enumerate(caches) if any(isinstance(o, (KVCache, RotatingKVCache)) for o in flat(c))]
    widths = [(2,3,4,8)[i%4] for i in range(len(with_attention))]
    got = KVCacheBuilder.for_model(model, config(method, widths))
    for i,w in zip(with_attention, widths, strict=True):
        for o in flat(got[i]):
            if hasattr(o, 'config'): assert o.config.bit_width_inlier==w
    for n in len(widths)-1, len(widths)+1:
        with pytest.raises(QuantizerConfigError, match=f'^bit_width_inlier must have {len(widths)} '): KVCacheBuilder.for_model(model, config(method, [4]*n))
