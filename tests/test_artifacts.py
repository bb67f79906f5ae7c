"Artifacts and where they are used: every method with a calibration, from the text to the caches of a model; what is damaged or another's is refused; lists of tables; tables that come from a seed."
import copy, dataclasses, os, subprocess, sys, warnings
from pathlib import Path
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
from tiny_models import tiny
from veloxquant_mlx.cache.base import KVCacheBuilder, KVCacheConfig, KVCacheFactory, serve_standalone
from veloxquant_mlx.cli import calibrated, calibration_of, named
from veloxquant_mlx.core.artifacts import ArtifactError, FileArtifactStore, artifact_path, content_hash
from veloxquant_mlx.core.errors import QuantizerConfigError
from veloxquant_mlx.engine.calibrate import artifact_key, model_id
from veloxquant_mlx.engine.layers import describe
from veloxquant_mlx.engine.registry import methods
from veloxquant_mlx.methods import spectral
from veloxquant_mlx.methods.a2ats import A2ATSOptions
from veloxquant_mlx.methods.vecinfer import VecInferOptions

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore:spectral:UserWarning')

METHODS = methods()
def calibrates(name):
    try: return bool(calibration_of(name))
    except QuantizerConfigError: return False
CALIBRATED = [k for k in METHODS if calibrates(k)]
LOADED = [k for k in CALIBRATED if not named(k)] # found by the model's weights
SMALL = dict(vecinfer=dict(key_codebook_bits=5, value_codebook_bits=4), a2ats=dict(a2ats_codebook_bits=4), skvq=dict(skvq_group_size=8, skvq_window=16)) # what fits a few hundred tokens
OTHER = dict(vecinfer=dict(key_codebook_bits=4), a2ats=dict(a2ats_codebook_bits=3), skvq=dict(skvq_bits_key=3), kvquant=dict(kvquant_bits=4)) # options that tables of SMALL do not serve
D = 16 # of the tiny model
TEXTS = np.random.default_rng(0).integers(0, 100, (4,100)).tolist()

def fields(method, **kw): return SMALL.get(method, {})|kw
def config(method, store, **kw): return KVCacheConfig(method=method, head_dim=D, store=store, **fields(method, **kw), **(dict(spectral_model_name='tiny') if method=='spectral' else {}))
def caches_of(model, c): return (serve_standalone if METHODS[c.method].standalone else KVCacheBuilder.for_model)(model, c)
def key_of(method, model): return f'{method}/tiny' if named(method) else artifact_key(method, model)

@pytest.fixture(scope='module')
def model(): return tiny('llama')

@pytest.fixture(scope='module')
def made(model):
    "method → arrays and facts, each made once"
    kept = {}
    def get(method):
        if method not in kept: kept[method] = calibrated(method, model, TEXTS, [f'{k}={v}' for k,v in SMALL.get(method, {}).items() if k!='skvq_window'])
        return kept[method]
    return get

@pytest.fixture
def filled(model, made, tmp_path):
    "A store with a method's artifact of the model"
    def fill(method, key=None):
        store, (arrays, facts) = FileArtifactStore(tmp_path/'store'), made(method)
        store.save(key or key_of(method, model), arrays, **facts)
        return store
    return fill

def test_there_are_calibrations(): assert {'spectral', 'vecinfer', 'a2ats', 'kvquant', 'skvq', 'amc'}<=set(CALIBRATED)

# --- files

@pytest.mark.parametrize('method', CALIBRATED)
def test_what_was_saved_comes_back_to_the_last_bit(method, model, made, filled):
    arrays, facts = made(method)
    store, key = filled(method), key_of(method, model)
    again = store.load(key, **facts)
    assert again.keys()==arrays.keys()
    for n,a in arrays.items(): assert (again[n].dtype, again[n].shape)==(a.dtype, a.shape) and np.array(again[n]).tobytes()==np.array(a).tobytes(), n
    assert store.manifest(key)['hash']==content_hash(arrays) and facts['model']==model_id(model) and facts['head_dim']==D

@pytest.mark.parametrize('method', CALIBRATED)
@pytest.mark.parametrize('damage,message', [('cut', 'is damaged'), ('empty', 'is damaged'), ('flipped', 'does not have the hash of its manifest'), ('facts', 'manifest does not have its seal'), ('moved', 'belongs to'), ('no manifest', 'has no manifest')])
def test_a_damaged_file_is_refused(method, damage, message, model, made, filled):
    "Before any cache has a row, and each kind in its own words; nothing of it is used"
    spectral._known.clear() # what was read of this content before
    store, key = filled(method), key_of(method, model)
    path = artifact_path(store.root, key)
    whole = path.read_bytes()
    if damage=='cut': path.write_bytes(whole[:-7])
    if damage=='empty': path.write_bytes(b'')
    if damage=='flipped': path.write_bytes(whole[:-5]+bytes([whole[-5]^4])+whole[-4:])
    if damage=='facts': path.write_bytes(whole.replace(b'head_dim', b'head_din'))
    if damage=='no manifest': mx.save_safetensors(str(path), made(method)[0])
    if damage=='moved':
        filled(method, f'{method}/elsewhere')
        path.write_bytes(artifact_path(store.root, f'{method}/elsewhere').read_bytes())
    with pytest.raises(ArtifactError, match=f'^store: .*{message}'): caches_of(model, config(method, store))
    path.write_bytes(whole)
    assert caches_of(model, config(method, store))

@pytest.mark.parametrize('method', CALIBRATED)
def test_another_model_is_refused(method, model, made, filled):
    "Of the same shapes, with other weights"
    store, other = filled(method), tiny('llama')
    proj = other.layers[1].self_attn.k_proj
    proj.weight = proj.weight*1.5
    assert model_id(other)!=model_id(model)
    with pytest.raises(ArtifactError, match='^store: .*(of other models|was made for model)'): caches_of(other, config(method, store))
    arrays, facts = made(method)
    store.save(key_of(method, other), arrays, **facts)
    with pytest.raises(ArtifactError, match='^store: .*was made for model'): caches_of(other, config(method, store))

@pytest.mark.parametrize('method', [m for m in LOADED if m in OTHER])
def test_other_options_are_refused(method, model, filled):
    "By name, with both values"
    (name,value), = OTHER[method].items()
    store = filled(method)
    with pytest.raises(ArtifactError, match=f'^store: .*was made for {name} .*got {value}'): caches_of(model, config(method, store, **{name: value}))

def test_a_list_of_widths_must_be_that_of_the_artifact(model, filled):
    store = filled('kvquant')
    assert caches_of(model, config('kvquant', store, bit_width_inlier=[3,3,3]))[0].artifact_shape
    with pytest.raises(ArtifactError, match='was made for kvquant_bits 3 .got 4'): caches_of(model, config('kvquant', store, bit_width_inlier=[3,4,3]))

# --- caches

@pytest.mark.parametrize('method', LOADED)
def test_an_artifact_is_used(method, model, made, filled):
    "`describe` tells, before and after; nothing waits for a fit, and nothing warns"
    store, tokens = filled(method), mx.array(TEXTS[1])[None]
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        caches = caches_of(model, config(method, store))
        for c in caches: c.expect_prompt(60)
        model(tokens[:,:60], cache=caches)
        for i in range(60, 70): out = model(tokens[:,i:i+1], cache=caches)
    assert all(artifact_key(method, model) in r['details'] for r in describe(caches))
    assert mx.isfinite(out).all() and not any(c.adopted for c in caches)
    without = caches_of(model, config(method, None))
    for c in without: c.expect_prompt(60)
    model(tokens[:,:60], cache=without)
    assert any(a.shape!=b.shape or not mx.array_equal(a, b) for a,b in zip(caches[0].payload(), without[0].payload()))

@pytest.mark.parametrize('method', LOADED)
@pytest.mark.parametrize('n', [0, 3, 60])
def test_calibrated_caches_are_saved_whole(method, n, model, filled, tmp_path):
    "A file needs no store; copies and files go on in the same way, from before the first row too"
    tokens = mx.array(TEXTS[2])[None]
    def go(caches, a, b):
        for c in caches: c.expect_prompt(b-a)
        return model(tokens[:,a:b], cache=caches)
    caches = caches_of(model, config(method, filled(method)))
    if n: go(caches, 0, n)
    save_prompt_cache(str(tmp_path/'file.safetensors'), caches)
    others = [load_prompt_cache(str(tmp_path/'file.safetensors')), copy.deepcopy(caches), [type(c).from_state(c.state) for c in caches]]
    assert all(str(describe(o))==str(describe(caches)) for o in others)
    assert all(a.nbytes==b.nbytes or n for o in others for a,b in zip(o, caches))
    want = [go(caches, n, n+30), *(model(tokens[:,i:i+1], cache=caches) for i in range(n+30, n+36))]
    for o in others:
        got = [go(o, n, n+30), *(model(tokens[:,i:i+1], cache=o) for i in range(n+30, n+36))]
        assert all(mx.array_equal(a, b) for a,b in zip(got, want))

@pytest.mark.parametrize('method', LOADED)
def test_calibrated_caches_in_chunks_and_batches(method, model, filled):
    "What is stored is the same for every chunking, and for a row alone or in a batch of three; bytes are those of the formula"
    store = filled(method)
    whole = caches_of(model, config(method, store))
    for c in whole: c.expect_prompt(60)
    for n in (60, *[1]*6): mx.eval(model(mx.array(TEXTS[:3])[:,whole[0].offset:whole[0].offset+n], cache=whole))
    for c in whole:
        c.commit()
        assert c.used_nbytes==c.formula_nbytes(66)
    keys, values = (mx.random.normal((3,whole[0].shape[1],66,D), key=mx.random.key(i)) for i in (0, 1))
    def stored(rows, calls):
        c, at, (k, v) = caches_of(model, config(method, store))[0], 0, (x[rows] for x in (keys, values))
        c.expect_prompt(60)
        for n in calls:
            h = c.update_and_fetch(k[:,:,at:at+n], v[:,:,at:at+n]); at += n
            mx.eval(mx.fast.scaled_dot_product_attention(mx.concatenate([k,k], axis=1)[:,:,at-n:at], *h, scale=.2, mask='causal' if n>1 else None))
        c.commit()
        return c.payload()
    first = stored(slice(0, 3), [60]+[1]*6)
    for calls in ([7]*8+[4]+[1]*6, [1]*66): assert all(mx.array_equal(a, b) for a,b in zip(first, stored(slice(0, 3), calls), strict=True))
    for i in range(3):
        for a,b in zip(first, stored(slice(i, i+1), [60]+[1]*6), strict=True): assert mx.array_equal(a if a.shape==b.shape else a[i:i+1] if a.shape[0]==3 else a[:,i:i+1], b)

THREADS = """
import os, threading
from test_artifacts import *
store, model, errors = FileArtifactStore(ROOT), tiny('llama'), []
mx.eval(model.parameters())
def use(caches):
    try: mx.eval(model(mx.array(TEXTS[0])[None], cache=caches), [c.state for c in caches])
    except RuntimeError as e: errors.append(f'{caches[0].method}, {caches[0].details()}: {e}')
for method in ('vecinfer', 'a2ats', 'kvquant', 'skvq', 'amc', 'spectral', 'qfilters', 'kvtc'):
    arrays, facts = calibrated(method, model, TEXTS, [f'{k}={v}' for k,v in SMALL.get(method, {}).items() if k!='skvq_window'])
    store.save(key_of(method, model), arrays, **facts)
    for given in (store, None):
        t = threading.Thread(target=use, args=(caches_of(model, config(method, given)),))
        t.start(); t.join()
print('errors', errors, flush=True)
os._exit(0) # MLX may abort where threads that ran a model are cleaned up
"""
def test_tables_serve_every_thread(tmp_path):
    "Caches that are made in one thread are used in another, as servers do: no table is left to be computed"
    here = Path(__file__).parent
    r = subprocess.run([sys.executable, '-c', THREADS.replace('ROOT', repr(str(tmp_path)))], cwd=here, capture_output=True, text=True, env=os.environ|dict(PYTHONPATH=os.pathsep.join([str(here), str(here.parent), os.environ.get('PYTHONPATH', '')])))
    assert 'errors []' in r.stdout, r.stdout+r.stderr[-2000:]

@pytest.mark.parametrize('method', LOADED)
def test_generation_with_an_artifact(method, model, filled):
    "The generator of mlx-lm"
    caches = caches_of(model, config(method, filled(method)))
    tokens = [t for t,_ in generate_step(mx.array(TEXTS[3][:50]), model, max_tokens=12, prompt_cache=caches)]
    assert len(tokens)==12 and all(c.offset in (61,62) for c in caches)

@pytest.mark.parametrize('method', LOADED)
def test_no_artifact_of_the_method(method, model, tmp_path):
    "A warning where `for_model` is called, and a line in the table; the method does what it does without a store"
    with pytest.warns(UserWarning, match=f'store: there is no artifact {artifact_key(method, model)}') as log: caches = caches_of(model, config(method, FileArtifactStore(tmp_path)))
    assert sum(o.category is UserWarning for o in log)==1 and all('store: no artifact of this model' in r['details'] for r in describe(caches))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        model(mx.array(TEXTS[0])[None], cache=caches)
    assert caches[0].offset==100

@pytest.mark.parametrize('method', LOADED)
def test_a_cache_alone_has_no_use_for_a_store(method, tmp_path):
    c = KVCacheFactory.create(config(method, FileArtifactStore(tmp_path)))
    with pytest.raises(QuantizerConfigError, match='^store must be used by KVCacheBuilder.for_model'): c.update_and_fetch(*[mx.ones((1,2,4,D))]*2)
    assert c.offset==0

@pytest.mark.parametrize('method', [k for k,m in METHODS.items() if not m.standalone and k not in CALIBRATED and not m.cache_class.reads_store and m.cache_class.artifact_options is None])
def test_methods_without_artifacts_say_so(method, model, tmp_path):
    "A store without effect does not pass unnoticed"
    try: caches = KVCacheBuilder.for_model(model, KVCacheConfig(method=method, store=FileArtifactStore(tmp_path)))
    except QuantizerConfigError as e: pytest.skip(str(e)) # its defaults do not fit this model
    assert any('store: unused, the method has no artifacts' in r['details'] for r in describe(caches))

# --- tables that come from a seed

SEEDED = ['turboquant_mse', 'turboquant_prod', 'polar', 'qjl']
OUTLIERS = dict(enable_outlier_two_stream=True, n_outlier_channels=4, n_calib_tokens=8)

@pytest.mark.parametrize('method', SEEDED)
@pytest.mark.parametrize('kw', [{}, dict(seed=7, bit_width_inlier=3), OUTLIERS], ids=['plain', 'seed', 'outliers'])
def test_tables_of_a_seed_are_kept_and_compared(method, kw, tmp_path):
    if method=='polar' and kw is OUTLIERS: pytest.skip('polar has no outlier stream')
    store, make = FileArtifactStore(tmp_path), lambda **more: KVCacheFactory.create(KVCacheConfig(method=method, head_dim=32, store=store, **kw|more))
    c = make()
    key, = store.keys(method)
    arrays = store.load(key)
    assert c.artifact==key and all(np.array(arrays[n]).tobytes()==np.array(a).tobytes() for side,s in zip(('key','value'), (c.keys_stream, c.values_stream)) for n,a in ((f'{side}_{n}', a) for n,a in s.codec.seeded().items()))
    c.append(mx.ones(32), mx.ones(32))
    make()
    assert store.keys(method)==[key]
    name = sorted(n for n in arrays if arrays[n].ndim==2)[0]
    store.save(key, arrays|{name: -arrays[name]}, **store.manifest(key)['facts'])
    store = FileArtifactStore(tmp_path) # another process looks again
    with pytest.raises(ArtifactError, match=f'^store: {key} has another {name} than seed'): make()
    store.save(key, arrays, **store.manifest(key)['facts']|dict(seed=1))
    with pytest.raises(ArtifactError, match='was made for seed 1'): make()

@pytest.mark.parametrize('method', SEEDED)
def test_tables_of_a_seed_inside_a_model(method, model, tmp_path):
    store = FileArtifactStore(tmp_path)
    caches = serve_standalone(model, KVCacheConfig(method=method, store=store))
    key, = store.keys(method)
    assert all(key in r['details'] for r in describe(caches))
    model(mx.array(TEXTS[0])[None], cache=caches)
    path = artifact_path(tmp_path, key)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match='is damaged'): serve_standalone(model, KVCacheConfig(method=method, store=FileArtifactStore(tmp_path)))

# --- tables as options

BOOKS = [np.random.default_rng(i).standard_normal((32,4)).astype(np.float32) for i in range(3)]
VALUES = [np.random.default_rng(9+i).standard_normal((16,8)).astype(np.float32) for i in range(3)]

def test_lists_of_tables():
    "An element for each layer with attention, whatever else the model's cache list holds"
    for name,n in (('llama', 3), ('gemma3', None), ('qwen3_next', None), ('falcon_h1', None)):
        model = tiny(name)
        plain = KVCacheBuilder.for_model(model, KVCacheConfig(method='kivi'))
        dim = next(c.config.head_dim for o in plain for c in (getattr(o, 'caches', None) or [o]) if hasattr(c, 'config'))
        if dim%8 or dim&(dim-1): continue
        with pytest.raises(QuantizerConfigError, match='^value_codebook must have ') as e: KVCacheBuilder.for_model(model, KVCacheConfig(method='vecinfer', head_dim=dim, options=VecInferOptions(value_codebook=[VALUES[0]]*40, value_codebook_bits=4)))
        n = n or int(str(e.value).split()[3])
        books = [VALUES[i%3]+i if i!=1 else None for i in range(n)]
        caches = KVCacheBuilder.for_model(model, KVCacheConfig(method='vecinfer', head_dim=dim, options=VecInferOptions(value_codebook=books, value_codebook_bits=4)))
        widths = KVCacheBuilder.for_model(model, KVCacheConfig(method='kivi', bit_width_inlier=[2+i%6 for i in range(n)]))
        order, seen = [2+i%6 for i in range(n)], 0
        for a,b in zip(caches, widths):
            for c,w in zip(getattr(a, 'caches', None) or [a], getattr(b, 'caches', None) or [b]):
                if not hasattr(c, 'given'): continue
                fits = [i for i in range(n) if order[i]==w.config.bit_width_inlier and (books[i] is None)==(c.given['value_codebook'] is None)]
                assert any(books[i] is None or np.allclose(np.array(c.given['value_codebook'])[0,0], books[i], atol=1e-2) for i in fits)
                seen += 1
        assert seen

def test_lists_of_arrays_of_a2ats(model):
    metrics, books = [np.eye(D)*(i+1)+.1 for i in range(3)], [np.random.default_rng(i).standard_normal((16,8)) for i in range(3)]
    options = A2ATSOptions(a2ats_codebook_bits=4, a2ats_query_h=metrics, a2ats_codebook=books)
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method='a2ats', head_dim=D, options=options))
    for c,b in zip(caches, books): assert np.allclose(np.array(c.codebook.astype(mx.float32)), b, atol=1e-2) and c.given and c.moments is None
    one = KVCacheBuilder.for_model(model, KVCacheConfig(method='a2ats', head_dim=D, options=A2ATSOptions(a2ats_codebook_bits=4, a2ats_query_h=metrics[0], a2ats_codebook=books)))
    assert mx.array_equal(one[0].table, caches[0].table) and mx.array_equal(one[2].table, caches[0].table)
    for n in (2, 4):
        with pytest.raises(QuantizerConfigError, match=f'^a2ats_codebook must have 3 elements, one per attention layer .got {n}'): KVCacheBuilder.for_model(model, KVCacheConfig(method='a2ats', head_dim=D, options=A2ATSOptions(a2ats_codebook_bits=4, a2ats_query_h=metrics[0], a2ats_codebook=(books*2)[:n])))

@pytest.mark.parametrize('method,options', [('vecinfer', lambda: VecInferOptions(value_codebook=VALUES, value_codebook_bits=4)), ('a2ats', lambda: A2ATSOptions(a2ats_query_h=[np.eye(D)]*3))])
def test_a_list_is_not_for_one_cache(method, options):
    with pytest.raises(QuantizerConfigError, match='must be the value of one cache, a list is for KVCacheBuilder.for_model .got a list of 3'): KVCacheFactory.create(KVCacheConfig(method=method, head_dim=D, options=options()))

def test_configurations_with_arrays_can_be_compared():
    "Equal numbers are equal; a configuration is a key of a dict"
    make = lambda scale=1., **kw: KVCacheConfig(method='vecinfer', head_dim=32, options=VecInferOptions(smooth_factors=np.ones(32)*scale, key_codebook=[BOOKS[0]*scale, None], value_codebook=mx.array(VALUES[0]), key_codebook_bits=5, value_codebook_bits=4), **kw)
    a, b = make(), make()
    assert a==b and a.options==b.options and hash(a)==hash(b) and len({a, b})==1 and a in [b] and {a: 1}[b]==1
    assert a!=make(2.) and a!=make(seed=1) and a.options!=make(2.).options and a!=3 and KVCacheConfig('kivi')==KVCacheConfig('kivi')!=a
    assert dataclasses.replace(a)==a and repr(a) and copy.deepcopy(a)==a

def test_a_store_and_tables_exclude_each_other(tmp_path):
    for method, options in (('vecinfer', VecInferOptions(smooth_factors=np.ones(32))), ('a2ats', A2ATSOptions(a2ats_query_h=np.eye(32)))):
        with pytest.raises(QuantizerConfigError, match='^store must be None if'): KVCacheConfig(method=method, head_dim=32, options=options, store=FileArtifactStore(tmp_path))
