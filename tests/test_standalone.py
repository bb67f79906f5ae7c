"The five caches of one head: what a user does with them outside any model, and what is refused."
import copy, math
import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny
from veloxquant_mlx.cache.base import STANDALONE_METHODS, KVCacheBuilder, KVCacheConfig, KVCacheFactory, serve_standalone
from veloxquant_mlx.core.abstractions import KVCache
from veloxquant_mlx.core.errors import QuantizerConfigError
from veloxquant_mlx.core.observers import DistortionObserver, KeyNormObserver, LatencyObserver, MemoryObserver
from veloxquant_mlx.engine.registry import methods

pytestmark = pytest.mark.filterwarnings('ignore:spectral:UserWarning')
every = pytest.mark.parametrize('method', sorted(STANDALONE_METHODS))
D = 64
K, V = (mx.random.normal((20,D), key=mx.random.key(i)) for i in (0, 1))
Q = mx.random.normal((D,), key=mx.random.key(2))
def make(method, **kw): return KVCacheFactory.create(KVCacheConfig(method=method, **dict(head_dim=D)|kw))
def filled(c, n=20, dtype=mx.float32, start=0):
    for i in range(start, start+n): c.append(K[i].astype(dtype), V[i].astype(dtype))
    return c

def test_there_are_five(): assert STANDALONE_METHODS=={'turboquant_prod', 'turboquant_mse', 'polar', 'qjl', 'spectral'}

@every
@pytest.mark.parametrize('dtype', [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_life_of_a_cache(method, dtype):
    "Filled, asked, copied, cleared; bytes are those of codes and scales, whatever the tables"
    c = make(method)
    assert isinstance(c, KVCache) and len(c)==c.memory_bytes()==0 and c.attend(Q.astype(dtype)).tolist()==[0.]*D
    filled(c, dtype=dtype)
    out = c.attend(Q.astype(dtype))
    assert (len(c), c.memory_bytes(), out.dtype, out.shape)==(20, c.formula_nbytes(20), dtype, (D,)) and mx.isfinite(out).all()
    per_token = c.memory_bytes()/20
    assert per_token<4*D and c.formula_nbytes(1000)/1000==per_token # nothing else is stored for a token, no rotation, no table
    twin = copy.deepcopy(c)
    twin.append(K[0].astype(dtype), V[0].astype(dtype))
    assert len(c)==20 and len(twin)==21 and mx.array_equal(c.attend(Q.astype(dtype)), out) and not mx.array_equal(twin.attend(Q.astype(dtype)), out)
    c.reset()
    assert len(c)==c.memory_bytes()==0
    assert mx.array_equal(filled(c, dtype=dtype).attend(Q.astype(dtype)), out)

@every
def test_one_row_at_a_time(method):
    "Keys and values may come apart; a query waits for both"
    c = make(method)
    for i in range(5): c.append_key(K[i])
    with pytest.raises(RuntimeError, match='5 keys but 0 values'): c.attend(Q)
    for i in range(5): c.append_value(V[i])
    assert mx.array_equal(c.attend(Q), filled(make(method), 5).attend(Q))

@every
def test_more_bits_are_nearer(method):
    "To exact attention; at the most bits they are near"
    p = mx.softmax(K@Q/math.sqrt(D))@V
    error = lambda b: mx.linalg.norm(filled(make(method, bit_width_inlier=b, **dict(jl_dim=16*D) if method=='qjl' else {})).attend(Q)-p).item()/mx.linalg.norm(p).item()
    most = max(methods()[method].cache_class.bit_widths)
    assert error(most)<error(2) and error(most)<.35

@every
@pytest.mark.parametrize('window', [1, 4, 19, 20, 50])
def test_window(method, window):
    "As a fresh cache with the newest tokens"
    c = filled(make(method, sliding_window=window))
    n = min(window, 20)
    assert len(c)==n and mx.allclose(c.attend(Q), filled(make(method), n, start=20-n).attend(Q), atol=1e-5)

@every
def test_a_window_frees(method):
    c = make(method, sliding_window=4)
    for i in range(600): c.append(K[i%20], V[i%20])
    assert len(c)==4 and c.memory_bytes()<=make(method).formula_nbytes(300)

@every
def test_capacity(method):
    "One more token raises and changes nothing"
    c = filled(make(method, capacity=3), 3)
    out = c.attend(Q)
    for f in (lambda: c.append(K[3], V[3]), lambda: c.append_key(K[3]), lambda: c.append_value(V[3])):
        with pytest.raises(ValueError, match='^capacity must be >= the tokens of the cache, 4 .got 3'): f()
    assert len(c)==3 and mx.array_equal(c.attend(Q), out)
    c.reset()
    assert len(filled(c, 3))==3

@every
def test_wrong_rows_are_refused(method):
    "In words; the cache stays as it was"
    c = filled(make(method), 3)
    out, bad = c.attend(Q), {'shape': K[:1], 'mlx array': np.zeros(D, np.float32), 'got list': [0.]*D, 'floating': mx.zeros(D, mx.int32), 'not finite': K[0]*mx.inf, 'begun in': K[0].astype(mx.float16)}
    for text,x in bad.items():
        for f in (lambda x=x: c.append(x, V[0]), lambda x=x: c.append(K[0], x), lambda x=x: c.append_key(x), lambda x=x: c.append_value(x)):
            with pytest.raises(ValueError, match=f'^{method}: .*{text}') as e: f()
            assert '\n' not in str(e.value)
    for q in (Q[None], Q[:-1], np.zeros(D), [0.]*D, mx.ones(D, mx.int32)):
        with pytest.raises(ValueError, match=f'^{method}: a query must be a floating-point mlx array of shape .{D},.'): c.attend(q)
    assert len(c)==3 and mx.array_equal(c.attend(Q), out)

@every
def test_extreme_rows(method):
    "Zeros come back as zeros; the largest numbers of fp16 stay finite"
    c = make(method)
    for _ in range(3): c.append(mx.zeros(D), mx.zeros(D))
    assert c.attend(Q).tolist()==[0.]*D
    c, x = make(method), (mx.where(K[0]>0, 1, -1)*65504).astype(mx.float16)
    for _ in range(3): c.append(x, x)
    assert mx.isfinite(c.attend(x)).all() and mx.isfinite(c.attend((Q/1000).astype(mx.float16))).all()

@every
def test_observers(method):
    "Each gets a row for each token; without them nothing is different"
    logs = [LatencyObserver(), MemoryObserver(), KeyNormObserver(), DistortionObserver()]
    c = filled(make(method, observers=logs), 6)
    assert [len(o.rows) for o in logs]==[6]*4 and logs[1].rows[-1]['nbytes']==c.memory_bytes() and logs[1].rows[-1]['ratio']<1
    assert abs(logs[2].rows[0]['mean']-mx.linalg.norm(K[0]).item())<1e-4 and 0<logs[3].rows[-1]['keys']<1.3 and 0<logs[3].rows[-1]['values']<1
    assert mx.array_equal(c.attend(Q), filled(make(method), 6).attend(Q)) and all(method in o.table() for o in logs)

@every
def test_models_are_refused(method):
    "With the name of a method that serves one, and of the way to be served all the same"
    with pytest.raises(QuantizerConfigError, match=f'^method must be servable inside a model, {method} is standalone .*turboquant_rvq.*serve_standalone'): KVCacheBuilder.for_model(tiny('llama'), KVCacheConfig(method=method))
    assert 'turboquant_rvq' in methods() and not methods()['turboquant_rvq'].standalone
    with pytest.raises(QuantizerConfigError, match='bit_width_inlier must be an int'): KVCacheConfig(method=method, bit_width_inlier=[2,2,2])
    assert len(serve_standalone(tiny('llama'), KVCacheConfig(method=method)))==3

@pytest.mark.parametrize('method', [k for k,m in methods().items() if not m.standalone][:1])
def test_only_standalone_methods_need_the_adapter(method):
    with pytest.raises(QuantizerConfigError, match='^method must be standalone'): serve_standalone(tiny('llama'), KVCacheConfig(method=method))
