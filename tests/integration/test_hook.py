"The hook, what passes it, the masks, and what mlx-lm finds or must not find on our caches (items 2, 4 and 8)."
import subprocess,sys
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from exact import METHODS, ExactCache, run, create, ours
from tiny_models import tiny
from veloxquant_mlx.engine.base import CompressedCache
from veloxquant_mlx.engine.hook import KVHandle, install, uninstall

sdpa = mx.fast.scaled_dot_product_attention
def normal(*shape, seed=0): return mx.random.normal(shape, key=mx.random.key(seed))

# --- one hook

def test_install_twice_uninstall_once():
    install()
    hook = mx.fast.scaled_dot_product_attention
    assert hook is not sdpa
    install()
    assert mx.fast.scaled_dot_product_attention is hook
    uninstall()
    assert mx.fast.scaled_dot_product_attention is sdpa
    uninstall()
    assert mx.fast.scaled_dot_product_attention is sdpa

IMPORTS = """
import mlx.core as mx, mlx.nn, mlx_lm.models.base as base, mlx_lm.models.cache as cache
sdpa,before = mx.fast.scaled_dot_product_attention, {o: dict(vars(o)) for o in (mx, mx.fast, mlx.nn, base, cache.KVCache)}
import importlib, pkgutil, veloxquant_mlx
for o in pkgutil.walk_packages(veloxquant_mlx.__path__, 'veloxquant_mlx.'):
    if not o.name.endswith('__main__'): importlib.import_module(o.name)
for o,d in before.items(): assert all(v is vars(o).get(k) for k,v in d.items()), o
from veloxquant_mlx.cache.base import KVCacheConfig, KVCacheFactory
config = KVCacheConfig(method='%s')
assert mx.fast.scaled_dot_product_attention is sdpa
KVCacheFactory.create(config)
assert mx.fast.scaled_dot_product_attention is not sdpa
"""
def test_importing_changes_nothing_until_a_cache_is_made():
    subprocess.run([sys.executable, '-W', 'ignore', '-c', IMPORTS % METHODS[0]], check=True)

def test_foreign_calls_pass_through():
    q,k,v,s = normal(2,4,5,16), normal(2,2,9,16, seed=1), normal(2,2,9,8, seed=2), normal(4, seed=3)
    causal = mx.arange(9)[None] <= mx.arange(4,9)[:,None]
    calls = [{}, dict(mask='causal'), dict(mask=causal), dict(mask=mx.where(causal, 0., -1e9)), dict(mask='causal', sinks=s), dict(stream=mx.cpu)]
    want = [sdpa(q, k, v, scale=.25, **kw) for kw in calls]
    grad = lambda: mx.grad(lambda q: mx.fast.scaled_dot_product_attention(q, k, v, scale=.25).sum())(q)
    want_grad = grad()
    install()
    for kw,w in zip(calls, want): assert mx.array_equal(mx.fast.scaled_dot_product_attention(q, k, v, scale=.25, **kw), w)
    assert mx.array_equal(grad(), want_grad)
    assert mx.allclose(mx.compile(lambda q: mx.fast.scaled_dot_product_attention(q, k, v, scale=.25))(q), want[0])
    with pytest.raises((TypeError, ValueError)): mx.fast.scaled_dot_product_attention(q, k, v)
    with pytest.raises((TypeError, ValueError)): mx.fast.scaled_dot_product_attention(q, k, v, scale=.25, bits=4)

def test_multi_head_attention_is_unchanged():
    mx.random.seed(0)
    layer,x = nn.MultiHeadAttention(16, 4), normal(2,7,16)
    want = layer(x, x, x)
    install()
    assert mx.array_equal(layer(x, x, x), want)

@pytest.mark.parametrize('name', ['llama', 'gemma3', 'gpt_oss', 'qwen3_next', 'llama4', 'deepseek_v3', 'plamo', 'minimax_m3_vl'])
def test_stock_caches_are_unchanged(name):
    model = tiny(name)
    want = run(model, make_prompt_cache(model))
    install()
    assert all(mx.array_equal(a, b) for a,b in zip(run(model, make_prompt_cache(model)), want))

def test_quantized_kv_cache_is_unchanged():
    model = tiny('llama_d32')
    want = run(model, [QuantizedKVCache(32, 8)])
    install()
    assert all(mx.array_equal(a, b) for a,b in zip(run(model, [QuantizedKVCache(32, 8)]), want))

def test_compressed_and_stock_caches_side_by_side():
    "Both kinds in one model: each layer is answered by its own cache"
    model = tiny('llama')
    want = run(model, make_prompt_cache(model))
    install()
    caches = [ExactCache(), KVCache(), ExactCache()]
    assert all(mx.array_equal(a, b) for a,b in zip(run(model, caches), want))
    assert [c.n_attend for c in ours(caches)] == [6,6]

def test_only_a_pair_of_one_cache_is_answered():
    "Keys twice (absorbed MLA), swapped, of two caches, or one plain array: plain attention on the dense rows"
    install()
    a,b = ExactCache(), ExactCache()
    k,v,q = normal(1,2,9,16), normal(1,2,9,16, seed=1), normal(1,4,1,16, seed=2)
    (ka,va),(_,vb) = a.update_and_fetch(k, v), b.update_and_fetch(k, v)
    attend = mx.fast.scaled_dot_product_attention
    for x,y,wx,wy in [(ka,ka,k,k), (va,ka,v,k), (ka,vb,k,v), (ka,v,k,v), (k,va,k,v)]:
        assert mx.array_equal(attend(q, x, y, scale=.25), sdpa(q, wx, wy, scale=.25))
    assert a.n_attend == b.n_attend == 0
    attend(q, ka, va, scale=.25)
    assert (a.n_attend, b.n_attend) == (1,0)

# --- handles

@pytest.mark.parametrize('method', METHODS)
def test_handles_are_lazy_arrays(method):
    "An operation on a handle is a plain array of the dense rows; a handle alone computes nothing"
    c = create(method, 16)
    k,v = normal(1,2,24,16), normal(1,2,24,16, seed=1)
    hk,hv = c.update_and_fetch(k, v)
    assert type(hk) is type(hv) is KVHandle and isinstance(hk, mx.array)
    assert (hk.kind, hv.kind) == ('k','v') and hk.owner is hv.owner is c
    assert hk.shape == k.shape and hv.shape == v.shape and hk.dtype == k.dtype
    assert type(hk.astype(mx.float32)) is type(hk[:,:,:3]) is type(hk+0) is mx.array
    assert mx.allclose(hk+0, k, atol=1e-6) and mx.allclose(hv+0, v, atol=1e-6)

# --- masks

def masks(L, T, H):
    "Every form that reaches a cache, by name"
    causal = mx.arange(T)[None] <= mx.arange(T-L,T)[:,None]
    window = causal & (mx.arange(T)[None] > mx.arange(T-L,T)[:,None]-8)
    padded = causal[None,None] & (mx.arange(T)>=mx.array([0,5])[:,None,None,None])
    return dict(none=None, causal='causal', bool=causal, window=window, batch=padded, float=mx.where(causal, normal(2,H,L,T, seed=9), -mx.inf))

def first_call(c, k, v):
    "A prompt, which some methods compress by what its queries saw"
    mx.eval(mx.fast.scaled_dot_product_attention(normal(len(k),4,k.shape[2],32, seed=7), *c.update_and_fetch(k, v), scale=.2, mask='causal'), c.state)

CALL = pytest.mark.parametrize('L,fused', [(1,False),(6,False),(6,True)], ids=['one token','six tokens','six tokens in parts'])

@pytest.mark.parametrize('method', METHODS)
@CALL
@pytest.mark.parametrize('mask', masks(1,2,1))
@pytest.mark.parametrize('sinks', [False,True])
def test_masks(method, L, fused, mask, sinks):
    "`attend` gives what plain attention gives on the rows that the handles stand for"
    c,H,T = create(method, 32, fused_sdpa=fused), 4, 320+L
    k,v,q = normal(2,2,T,32), normal(2,2,T,32, seed=1), normal(2,H,L,32, seed=2)
    first_call(c, k[:,:,:320], v[:,:,:320])
    hk,hv = c.update_and_fetch(k[:,:,320:], v[:,:,320:])
    kw = dict(scale=.2, mask=masks(L, T, H)[mask], sinks=normal(H, seed=3) if sinks else None)
    got = mx.fast.scaled_dot_product_attention(q, hk, hv, **kw)
    if mask=='none' and L>1: kw['mask'] = 'causal' # what mlx-lm means by it
    assert mx.allclose(got, sdpa(q, hk+0, hv+0, **kw), atol=2e-5, rtol=1e-4)

@pytest.mark.parametrize('method', METHODS)
@CALL
def test_fully_masked_row_is_finite(method, L, fused):
    "Queries of padding see nothing; NaN here would reach the next layer's keys"
    c = create(method, 32, fused_sdpa=fused)
    first_call(c, normal(1,2,320,32), normal(1,2,320,32, seed=1))
    hk,hv = c.update_and_fetch(normal(1,2,L,32, seed=2), normal(1,2,L,32, seed=3))
    assert mx.isfinite(mx.fast.scaled_dot_product_attention(normal(1,4,L,32, seed=4), hk, hv, scale=.2, mask=mx.zeros((L,320+L), mx.bool_))).all()

@pytest.mark.parametrize('method', METHODS)
def test_mask_of_wrong_length_is_an_error(method):
    c = create(method, 32)
    hk,hv = c.update_and_fetch(normal(1,2,20,32), normal(1,2,20,32, seed=1))
    with pytest.raises(ValueError, match=r'(?s)(19.*20|20.*19)'):
        mx.fast.scaled_dot_product_attention(normal(1,4,20,32, seed=2), hk, hv, scale=.2, mask=mx.ones((20,19), mx.bool_))

@pytest.mark.parametrize('method', METHODS)
def test_make_mask_follows_the_stock_order(method):
    ref,c = KVCache(), create(method, 16)
    for n in 0,9:
        if n:
            for o in ref,c: o.update_and_fetch(normal(1,2,n,16), normal(1,2,n,16, seed=1))
        for N in 1,5:
            for window in None,4,50:
                for array in False,True:
                    a,b = c.make_mask(N, return_array=array, window_size=window), ref.make_mask(N, return_array=array, window_size=window)
                    assert mx.array_equal(a, b) if isinstance(b, mx.array) else a==b

# --- what mlx-lm looks for

ABSENT = 'to_quantized', 'bits', 'group_size', '__len__', '__bool__'

@pytest.mark.parametrize('method', METHODS)
def test_members(method):
    c = create(method, 16)
    assert isinstance(c, KVCache) and isinstance(c, CompressedCache)
    assert c, 'a falsy cache loses its make_mask'
    for o in ABSENT: assert not hasattr(c, o) and not hasattr(type(c), o), o
    assert getattr(type(c), 'merge', None) != KVCache.merge
    assert getattr(mlx_cache, type(c).__name__) is type(c), 'load_prompt_cache looks there'
    assert c.meta_state == '' and c.offset == c.size() == c.nbytes == 0 and c.empty()
    assert c.trim(0) == 0 and c.is_trimmable() in (True, False)
    c.expect_prompt(3)
    c.update_and_fetch(normal(1,2,3,16), normal(1,2,3,16, seed=1))
    assert c.offset == 3 and not c.empty() and c.nbytes > 0 and c.trim(0) == 0
    for o in ABSENT: assert not hasattr(c, o), o

def test_no_member_of_kvcache_is_inherited():
    "A member that a new mlx-lm adds to `KVCache` must be overridden or hidden before it acts on us"
    ours = [vars(o) for o in CompressedCache.__mro__[:CompressedCache.__mro__.index(KVCache)]]
    members = {o for c in KVCache.__mro__ if c is not object for o in vars(c)}
    ignored = {'__module__', '__doc__', '__dict__', '__weakref__', '__qualname__', '__firstlineno__', '__static_attributes__', '__annotations__'}
    assert not [o for o in sorted(members-ignored) if not any(o in v for v in ours)]
