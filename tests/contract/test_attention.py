"What attention reads: exact prompts, every mask, sinks, grouped queries, head dimensions, dtypes, windows, reading in parts."
import mlx.core as mx
import numpy as np
import pytest
from cases import *
from veloxquant_mlx.core.errors import QuantizerConfigError

each, few, one = over(CASES), over(FEW), over(ONE)
keeps = over(FEW, lambda t: not t.evicts)

def sinks_of(n): return mx.array(np.random.default_rng(5).standard_normal(n).astype(np.float32))

# --- prompts

@over(CASES, lambda t: t.exact_prompt)
def test_a_prompt_in_one_call_is_exact(case):
    x = rows()
    out, = feed(case.create(), x)
    assert close(out, causal(x))

@few
def test_one_token_reads_everything_from_the_cache(case):
    "Its own row too: the output is attention over the rows that are stored, or over those of them that the method chooses"
    c, x = filled(case), step()
    out = call(c, x)
    assert close(out, attention(x.q, *decoded(c), reads(c, x)))

@over(FEW, lambda t: not t.evicts and not t.prompt_end)
def test_later_tokens_of_a_prompt_read_their_own_call_exactly(case):
    "Earlier tokens are read as they are stored after the call"
    c, x = filled(case), rows(40, seed=1)
    out = call(c, x)
    k, v = (mx.concatenate([o[:,:,:T], own], axis=2) for o,own in zip(decoded(c), (x.k, x.v)))
    assert close(out, attention(x.q, k, v, 'causal'))

@each
def test_while_nothing_is_compressed_no_token_is_lost(case):
    "Full attention in every chunking, up to the first token that is packed"
    n = exact_tokens(case)
    if case.name.isdigit(): assert n==EXACT.get(case.method, n)
    if not n: pytest.skip('packs at once')
    x = rows(n)
    want = causal(x)
    for chunks in (1,)*n, chunks_of(n, 7), (n-1,1): assert close(mx.concatenate(feed(case.create(), x, chunks), axis=2), want), len(chunks)

@pytest.mark.parametrize('method', [m for m in SERVABLE if len(widths(m))>1 and not traits(m).evicts])
def test_error_shrinks_with_bits(method):
    x = rows()
    size = lambda a: mx.sqrt((a**2).mean()).item()
    errors = [[size(a-b)/size(b) for a,b in zip(decoded(filled(case, x)), (x.k, x.v))] for case in widths(method)]
    for name,side in zip('kv', zip(*errors)):
        if name in traits(method).sides: assert list(side)==sorted(side, reverse=True) and len(set(side))==len(side) and side[0]<traits(method).worst and side[-1]<.1

# --- heads and dtypes

@few
@pytest.mark.parametrize('n_rep', [1,3,4])
def test_grouped_queries(case, n_rep):
    "Query head h reads the rows of KV head h // n_rep, in a prompt, in a chunk and in decoding"
    x, c = rows(n_rep=n_rep), case.create()
    y, z = rows(9, n_rep=n_rep, seed=1), step(2, n_rep=n_rep)
    if case.traits.exact_prompt: assert close(feed(c, x)[0], causal(x))
    else: feed(c, x)
    if case.traits.evicts:
        for n in (2,1) if case.traits.reads_rows else (1,):
            out, chosen = call(c, z[:n]), reads(c, z[:n])
            assert close(out, attention(z.q[:,:,:n], *decoded(c), 'causal' if chosen is None else chosen))
        return
    out, old = call(c, y), decoded(c)
    k, v = (mx.concatenate([o[:,:,:T], own], axis=2) for o,own in zip(old, (y.k, y.v))) if not case.traits.prompt_end else (None, None)
    if k is not None: assert close(out, attention(y.q, k, v, 'causal'))
    assert close(call(c, z), attention(z.q, *decoded(c), reads(c, z)))

@few
@pytest.mark.parametrize('D,D_v', [(48,32), (32,48), (80,80), (64,16)])
def test_head_dims(case, D, D_v):
    "Keys and values may differ, and need not be powers of two; a method for which they must be says so"
    x, z = rows(D=D, D_v=D_v), step(D=D, D_v=D_v)
    if any(d&(d-1) for s,d in zip('kv', (D, D_v)) if s in case.traits.powers_of_two):
        with pytest.raises(QuantizerConfigError, match='must be a power of 2'): feed(case.create(head_dim=D), x)
        return
    c = case.create(head_dim=D)
    out, = feed(c, x)
    assert out.shape==(1,H_Q,T,D_v) and c.shape==(1,H,D,D_v) and c.fp16_nbytes==2*H*T*(D+D_v)
    if case.traits.exact_prompt: assert close(out, causal(x))
    assert close(call(c, z), attention(z.q, *decoded(c), reads(c, z)))
    if not case.traits.evicts: assert abs(c.used_nbytes/c.formula_nbytes(T+1)-1)<.03

@few
@pytest.mark.parametrize('dtype,eps', [(mx.float16,2**-10), (mx.bfloat16,2**-7)], ids=['float16','bfloat16'])
def test_output_dtype(case, dtype, eps):
    "The queries' dtype comes out; in decoding it is the float32 result, rounded once"
    x, z = rows(), step()
    a, b = case.create(), case.create()
    (want,), (out,) = feed(a, x), feed(b, x.astype(dtype))
    assert out.dtype==dtype and close(out, want, 8*eps)
    want, out = call(a, z), call(b, z.astype(dtype))
    assert out.dtype==dtype and close(out, want, eps)
    assert all(o.dtype==dtype for o in b.keys_and_values())

# --- masks and sinks

def masks(L, n, B=2):
    "Every form that reaches a cache, by name: what is given and what it means"
    causal = mx.arange(n)[None] <= mx.arange(n-L, n)[:,None]
    far = causal & (mx.arange(n)[None] > mx.arange(n-L, n)[:,None]-40)
    padded = causal[None,None] & (mx.arange(n)>=mx.array([0,9][:B])[:,None,None,None])
    bias = mx.array(np.random.default_rng(6).standard_normal((B,H_Q,L,n)).astype(np.float32))
    return dict(none=(None, causal), causal=('causal', causal), bool=(causal, causal), band=(far, far), padded=(padded, padded),
        additive=(mx.where(causal, 0., -1e9), causal), scores=(mx.where(causal, bias, -mx.inf),)*2)

@few
@pytest.mark.parametrize('L,fused', [(1,False),(6,False),(6,True)], ids=['one token','six tokens','six tokens in parts'])
def test_masks(case, L, fused):
    "With and without sinks, whose logits join the softmax and carry no value; where rows were forgotten, a mask over tokens shows those that are left"
    if L>1 and not case.traits.reads_rows: pytest.skip('a call of several tokens does not read rows as they lie')
    x, y = rows(B=2), rows(L, B=2, seed=1)
    c = filled(case, x, fused_sdpa=fused)
    handles = c.update_and_fetch(y.k, y.v)
    k, v = (o+0 for o in handles)
    for name,(given,meant) in masks(L, T+L).items():
        for sinks in None, sinks_of(H_Q):
            out = mx.fast.scaled_dot_product_attention(y.q, *handles, scale=SCALE, mask=given, sinks=sinks)
            assert close(out, attention(y.q, k, v, reads(c, y, given, meant), sinks)), (name, sinks is not None)

@over(FEW, lambda t: t.exact_prompt)
def test_masks_of_a_prompt(case):
    x, sinks = rows(70, B=2), sinks_of(H_Q)
    for name,(given,meant) in masks(70, 70).items():
        if name in ('band','padded'): continue # rows that see nothing are no question here
        for s in None, sinks: assert close(call(case.create(), x, given, s), attention(*x, meant, s)), (name, s is not None)

@few
@pytest.mark.parametrize('L', [1,6])
def test_a_mask_of_another_length_is_an_error(case, L):
    "That names both lengths and changes nothing"
    c, y = filled(case), rows(L, seed=1)
    handles = c.update_and_fetch(y.k, y.v)
    for n in T+L-1, T+L+1, L:
        with pytest.raises(ValueError) as e: mx.eval(mx.fast.scaled_dot_product_attention(y.q, *handles, scale=SCALE, mask=mx.ones((L,n), mx.bool_)))
        assert str(n) in str(e.value) and str(T+L) in str(e.value) and '\n' not in str(e.value)

@one
def test_a_mask_of_another_length_in_a_prompt(case):
    x = rows(20)
    for n in 19, 21:
        with pytest.raises(ValueError) as e: mx.eval(call(case.create(), x, mx.ones((20,n), mx.bool_)))
        assert str(n) in str(e.value) and '20' in str(e.value)

@few
def test_a_row_that_sees_nothing_is_finite(case):
    "Queries of padding; NaN would reach the next layer's keys"
    for fused in False, True:
        c = filled(case, fused_sdpa=fused)
        for L in 1, 6:
            for dtype,nothing in (mx.bool_,False), (mx.float32,-mx.inf):
                assert mx.isfinite(call(c, rows(L, seed=L), mx.full((L,c.offset+L), nothing, dtype))).all(), (fused, L, dtype)

@one
def test_every_attention_of_a_call_sees_the_same(case):
    "Layers that share rows ask more than once"
    c, y = filled(case), step()
    handles = c.update_and_fetch(y.k, y.v)
    out = [mx.fast.scaled_dot_product_attention(y.q, *o, scale=SCALE) for o in (handles, handles, c.keys_and_values())]
    assert mx.array_equal(out[0], out[1]) and mx.array_equal(out[0], out[2])

# --- the hook is needed

@few
def test_a_bypassed_hook_is_an_error(case):
    "Of methods that need queries, and of windows, which hand-written attention would not know: at the next call, changing nothing"
    for kw in {}, *([] if case.traits.evicts else [dict(sliding_window=64)]):
        c, x = case.create(**kw), rows(60)
        if case.traits.prompt_end: c.expect_prompt(60)
        c.update_and_fetch(x.k, x.v)
        before = stored(c)
        if not c.needs_queries and not kw: c.update_and_fetch(x.k, x.v)
        else:
            with pytest.raises(RuntimeError, match='attention hook bypassed') as e: c.update_and_fetch(x.k, x.v)
            assert stored(c)==before and c.offset==60 and '\n' not in str(e.value)

# --- sliding windows

@keeps
@pytest.mark.parametrize('w', [1,24,T,4*T])
def test_sliding_window(case, w):
    "A band over the rows that an unlimited cache reads; storage follows the window"
    w = -(-w//case.window_unit)*case.window_unit
    a, b, at, x = case.create(), case.create(sliding_window=w), 0, rows(T+61)
    if a.needs_queries or case.traits.prompt_end: a = b # what queries see, or what is left when a prompt ends, decides what is packed: the cache's own rows
    for n in (50,1,T-51,1,1,40,1,18):
        y, at = x[at:at+n], at+n
        handles = a.update_and_fetch(y.k, y.v)
        k, v = (o+0 for o in handles)
        q, j = mx.arange(at-n, at)[:,None], mx.arange(a.first, at)[None]
        out = call(b, y) if a is not b else mx.fast.scaled_dot_product_attention(y.q, *handles, scale=SCALE, mask=b.make_mask(n) if n==1 else 'causal')
        assert close(out, attention(y.q, k, v, reads(a, y, meant=(j<=q) & (j>q-w)))), at
    assert b.offset==at

@keeps
def test_a_sliding_window_in_single_steps(case):
    "Past every border of a block and of what is freed"
    c = filled(case, rows(230), sliding_window=-(-24//case.window_unit)*case.window_unit)
    for i in range(110): assert mx.isfinite(call(c, step(i))).all(), i
    assert c.offset==340 and c.nbytes

@keeps
def test_a_sliding_window_bounds_the_bytes(case):
    w, x, step = 64, rows(2976), 48 # sixteen steps are three times the tokens that are freed at once
    c, sizes = case.create(sliding_window=w), []
    for i in range(0, x.n, step):
        feed(c, x[i:i+step])
        sizes.append(c.nbytes)
    assert max(sizes[30:])<=1.15*max(sizes[12:30]) and c.offset==x.n
    full = filled(case, x if case.traits.prompt_end else x[:1000]) # exact rows that wait for the end of a prompt weigh as much as many compressed ones
    assert max(sizes[12:])<full.nbytes

@keeps
def test_a_sliding_window_is_not_trimmed(case):
    "Rows before the window are gone: a trim could not bring them back"
    c = filled(case, sliding_window=64)
    before = stored(c)
    assert not c.is_trimmable() and not case.create(sliding_window=64).is_trimmable()
    assert c.trim(0)==c.trim(3)==0 and c.offset==T and stored(c)==before

@keeps
def test_state_of_a_sliding_window(case):
    c, y = filled(case, rows(900), chunks_of(900, 50), sliding_window=64), step()
    again = type(c).from_state(c.state)
    assert stored(again)==stored(c) and mx.array_equal(call(again, y), call(c, y))

@over(FEW, lambda t: t.evicts)
def test_no_sliding_window_where_rows_are_evicted(case):
    with pytest.raises(ValueError, match='^sliding_window.*64') as e: case.create(sliding_window=64)
    assert any(o in str(e.value) for o in ('budget','window_size','ratio'))

# --- several tokens on a packed cache

@keeps
@pytest.mark.parametrize('settings', [dict(fused_sdpa=True), dict(fused_sdpa=None), dict(fused_sdpa_memory_bound=True), dict(use_metal_kernels=False)], ids=str)
def test_reading_in_parts_gives_the_same(case, settings):
    x, y = rows(2200), rows(5, seed=1)
    want, out = (call(filled(case, x, **kw), y) for kw in ({}, settings))
    assert close(out, want)

@one
def test_memory_bound(case):
    "The transient of a call does not grow with the tokens that are stored"
    peaks = []
    for n in 4096, 12288:
        c, y = filled(case, rows(n), chunks_of(n, 1024), fused_sdpa_memory_bound=True), rows(2, seed=1)
        mx.eval(*y)
        base = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(call(c, y))
        peaks.append(mx.get_peak_memory()-base)
    dense = 2*(12288-4096)*H*D*4 # by which both sides grow
    assert peaks[1]-peaks[0]<dense/2, peaks
