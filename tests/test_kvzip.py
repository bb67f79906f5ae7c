"kvzip's pass of repetition on models of all kinds, its kernels, and a saved context on the embedded model."
import copy, sys
from pathlib import Path
import mlx.core as mx
import numpy as np
import pytest
sys.path.insert(0, str(Path(__file__).parent/'contract'))
from emulated import emulated
from tiny_models import tiny
from veloxquant_mlx.cache.base import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.cache.options import KVzipOptions
from veloxquant_mlx.engine.attention import attend_rows
from veloxquant_mlx.engine.hook import install
from veloxquant_mlx.kernels.evict import sums_gap
from veloxquant_mlx.kernels.runtime import use_backend
from veloxquant_mlx.methods.kvzip import *

@pytest.fixture(autouse=True)
def hook(): install() # other tests of the process may have taken it away

def draw(seed, *shapes): return [mx.array(np.random.default_rng([seed, i]).standard_normal(s).astype(np.float32)) for i,s in enumerate(shapes)]
IDS = np.random.default_rng(0).integers(0, 100, 90).tolist()
ASKS = dict(first_ids=[1,2,3], next_ids=[4,5], suffix_ids=[6])

def read(model, budget=24, n=90):
    caches = KVCacheBuilder.for_model(model, KVCacheConfig('kvzip', options=KVzipOptions(budget)))
    for a in range(0, n, 40):
        model(mx.array(IDS[a:min(a+40, n)])[None], cache=caches)
        mx.eval([c.state for c in caches])
    return caches

def arrays(o): return [o] if isinstance(o, mx.array) else [a for x in o for a in arrays(x)] if isinstance(o, (list, tuple)) else []

# --- models

KINDS = ['llama', 'gemma3_text', 'gpt_oss', 'cohere2', 'jamba', 'falcon_h1', 'baichuan_m1', 'afm7', 'gemma4_text', 'qwen3_next', 'nemotron-nas', 'iquestloopcoder'] # sliding windows, sinks, recurrent states, composite entries, shared rows, several attends
@pytest.mark.parametrize('name', KINDS)
def test_a_pass_leaves_no_trace(name):
    "Bytes, states and the next logits are those of a model that repeated nothing; then exactly the budget stays, and steps go on"
    model = tiny(name)
    caches, untouched = read(model), read(model)
    ours = kvzip_caches(caches)
    if not ours: pytest.skip('no layer of full attention')
    scores = score_context(model, caches, IDS, **ASKS, chunk=40)
    for c,d in zip(caches, untouched):
        a, b = arrays(c.state), arrays(d.state)
        assert len(a)==len(b) and all(x.shape==y.shape and (mx.array_equal(x, y, equal_nan=True) or x.dtype==mx.uint8) for x,y in zip(a, b))
    step = lambda caches: model(mx.array([[7]]), cache=copy.deepcopy(caches))
    assert mx.array_equal(step(caches), step(untouched))
    assert all(s.shape==(1, c.shape[1], 90) and 0<=s.min() and s.max()<=1 for s,c in zip(scores, ours))
    heads = kvzip_compress(model, caches, IDS, **ASKS, chunk=40)
    assert sum(map(sum, heads))==24*sum(map(len, heads)) and min(map(min, heads))>=4
    assert all(c.offset==90 and c.kept_bytes==sum(c.heads)*sum(c.shape[2:])*4 for c in ours)
    for t in 7, 8, 9:
        x = model(mx.array([[t]]), cache=caches)
        assert mx.isfinite(x).all()
    assert mx.isfinite(model(mx.array([[3,4,5]]), cache=caches)).all()

@pytest.mark.parametrize('name', ['llama', 'gpt_oss', 'jamba', 'afm7'])
def test_a_context_that_is_kept_whole_is_read_as_before(name):
    "Flat, with all its pairs, a context is read as the rectangle was"
    model = tiny(name)
    caches, whole = read(model, 90), read(model, 90)
    for i,c in enumerate(kvzip_caches(caches)): c.keep(mx.ones((1, c.shape[1], 90), mx.bool_))
    a, b = (model(mx.array([[7,8,9]]), cache=o) for o in (caches, whole))
    assert mx.abs(a-b).max()<1e-4
    a, b = (model(mx.array([[10]]), cache=o) for o in (caches, whole))
    assert mx.abs(a-b).max()<1e-4

def test_a_bypassed_hook_is_named():
    model = tiny('llama')
    caches, installed = read(model), mx.fast.scaled_dot_product_attention
    mx.fast.scaled_dot_product_attention = installed._vq_original
    try:
        with pytest.raises(RuntimeError, match='kvzip: attention hook bypassed by mlx_lm.models.llama'): kvzip_compress(model, caches, IDS, **ASKS)
    finally: mx.fast.scaled_dot_product_attention = installed
    assert all(c.offset==90 and c.repeat is None for c in caches)
    assert kvzip_compress(model, caches, IDS, **ASKS)

# --- kernels

@pytest.mark.parametrize('layout', ['cuda', 'metal'])
@pytest.mark.parametrize('B,H,n_rep,L,n,D,dtype,with_sinks', [(1,2,2,27,61,64,mx.float16,False), (2,1,3,19,61,32,mx.bfloat16,True), (1,2,4,9,150,48,mx.float16,True), (1,1,2,130,131,80,mx.bfloat16,False), (2,2,1,8,16,16,mx.float16,False)], ids=str)
def test_attention_maxima(B, H, n_rep, L, n, D, dtype, with_sinks, layout):
    q, k, sinks = draw(0, (B,H*n_rep,L,D), (B,H,n,D), (H*n_rep,))
    q, k, sinks = (2*q).astype(dtype), k.astype(dtype), sinks if with_sinks else None
    assert sums_gap(q, k) is None
    want = repeat_scores(q, k, D**-.5, 0, n, sinks)
    with use_backend(emulated(layout)): got = attention_maxima(q, k, D**-.5, sinks)
    assert got.shape==(B,H,n) and mx.abs(got-want).max()<3e-3

@pytest.mark.parametrize('layout', ['cuda', 'metal'])
@pytest.mark.parametrize('B,n_rep,D,D_v,heads,n_tail,room,dtype,with_sinks', [(1,3,64,64,(27,1),5,16,mx.float16,False), (2,1,80,48,(0,9,113,2),1,1,mx.float32,True), (1,4,128,32,(700,3,30),61,256,mx.bfloat16,True), (1,2,24,256,(4,4),13,20,mx.float16,False)], ids=str)
def test_ragged_attention(B, n_rep, D, D_v, heads, n_tail, room, dtype, with_sinks, layout):
    "Heads with no rows in front, with many, head dimensions that are no multiple of a simdgroup"
    H, F = len(heads)//B, sum(heads)
    q, fk, fv, tk, tv, sinks = (o.astype(dtype) for o in draw(5, (B,H*n_rep,1,D), (F,D), (F,D_v), (B,H,room,D), (B,H,room,D_v), (H*n_rep,)))
    sinks, ends = sinks if with_sinks else None, np.cumsum([0, *heads])
    cu = mx.array(np.array([ends[i*H:(i+1)*H+1] for i in range(B)], np.int32))
    nan = mx.arange(room)[:, None]>=n_tail
    with use_backend(emulated(layout)): got = ragged_attention(q, (fk, fv), cu, (mx.where(nan, mx.nan, tk), mx.where(nan, mx.nan, tv)), n_tail, max(heads), D**-.5, sinks)
    for i in range(B*H):
        b, h = divmod(i, H)
        k, v = (mx.concatenate([f[None,None,ends[i]:ends[i+1]], t[b:b+1,h:h+1,:n_tail]], axis=2) for f,t in ((fk, tk), (fv, tv)))
        want = attend_rows(q[b:b+1,h*n_rep:(h+1)*n_rep], k, v, D**-.5, None, None if sinks is None else sinks[h*n_rep:(h+1)*n_rep])
        assert mx.abs(got[b:b+1,h*n_rep:(h+1)*n_rep]-want).max()<1e-4

@pytest.mark.parametrize('layout', ['cuda', 'metal'])
def test_a_pass_with_kernels(layout):
    "Scores, rows that stay, and what steps read, as with array operations"
    q, k, v, sinks = draw(3, (2,6,130,32), (2,2,130,32), (2,2,130,48), (6,))
    q, k, v = (o.astype(mx.float16) for o in (2*q, k, v))
    def call(c, a, b): return mx.fast.scaled_dot_product_attention(q[:,:,a:b], *c.update_and_fetch(k[:,:,a:b], v[:,:,a:b]), scale=.2, mask=c.make_mask(b-a), sinks=sinks)
    with use_backend(emulated(layout)): fused = KVzipCache.of(head_dim=32, use_metal_kernels=True, kvzip_budget=20)
    plain = KVzipCache.of(head_dim=32, use_metal_kernels=False, kvzip_budget=20)
    found = []
    for c in fused, plain:
        with use_backend(emulated(layout) if c is fused else None):
            mx.eval(call(c, 0, 60))
            c.begin_repeat(0, 60)
            mx.eval(call(c, 60, 90))
            scores = c.repeat.scores
            c.end_repeat()
            mask, = best_pairs([scores], 40)
            c.keep(mask)
            found.append((scores, mask, [call(c, 60+i, 61+i) for i in range(5)], call(c, 65, 70), c.positions))
    (s, m, *outs, at), (t, n, *wants, pos) = found
    assert mx.abs(s-t).max()<3e-3 and (m!=n).sum()<=4
    if mx.array_equal(m, n):
        assert mx.array_equal(at, pos)
        assert all(mx.abs(a-b).max()<3e-3 for a,b in zip([*outs[0], outs[1]], [*wants[0], wants[1]]))
