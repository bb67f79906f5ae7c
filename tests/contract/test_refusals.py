"Wrong input is refused in one clear line, and the cache is then exactly what it was."
import mlx.core as mx
import pytest
from cases import *

each, few, one = over(CASES), over(FEW), over(ONE)

def z(*shape, dtype=mx.float32): return mx.zeros(shape, dtype)
def spoilt(x, at, value):
    y = mx.array(x)
    y[at] = value
    return y

WRONG = dict( # keys and values that no cache takes, whatever it holds
    rank_2=lambda: (z(2,D), z(2,D)), rank_3=lambda: (z(H,2,D), z(H,2,D)), rank_5=lambda: (z(1,1,H,2,D), z(1,1,H,2,D)),
    no_token=lambda: (z(1,H,0,D), z(1,H,0,D)), other_B=lambda: (z(1,H,2,D), z(2,H,2,D)), other_H=lambda: (z(1,H,2,D), z(1,H+1,2,D)),
    other_L=lambda: (z(1,H,2,D), z(1,H,3,D)), rank_of_one=lambda: (z(1,H,2,D), z(H,2,D)), integers=lambda: (z(1,H,2,D, dtype=mx.int32),)*2,
    bools=lambda: (z(1,H,2,D, dtype=mx.bool_),)*2, two_dtypes=lambda: (z(1,H,2,D), z(1,H,2,D, dtype=mx.float16)))
CHANGED = dict( # and those that a cache with rows of (1, H, D, D) float32 does not
    B=lambda: (z(2,H,2,D), z(2,H,2,D)), H=lambda: (z(1,1,2,D), z(1,1,2,D)), D=lambda: (z(1,H,2,D+8), z(1,H,2,D)), D_v=lambda: (z(1,H,2,D), z(1,H,2,D-8)),
    float16=lambda: (z(1,H,2,D, dtype=mx.float16),)*2, bfloat16=lambda: (z(1,H,2,D, dtype=mx.bfloat16),)*2)
NOT_FINITE = [mx.nan, mx.inf, -mx.inf]

def refused(c, k, v, *words):
    "`update_and_fetch` raises a `ValueError` of one line that has all words, and c is as before"
    before, offset, nbytes, shape, dtype = stored(c), c.offset, c.nbytes, c.shape, c.source_dtype
    with pytest.raises(ValueError) as e: c.update_and_fetch(k, v)
    text = str(e.value)
    assert '\n' not in text and 10<len(text)<300 and all(str(o) in text for o in words), text
    assert (c.offset, c.nbytes, c.shape, c.source_dtype)==(offset, nbytes, shape, dtype) and stored(c)==before

@one
@pytest.mark.parametrize('wrong', [*WRONG, *CHANGED])
def test_shapes_and_dtypes(case, wrong):
    "The method and what was given are named; the cache goes on as if nothing had happened"
    c, other, y = filled(case), filled(case), step()
    k, v = (WRONG|CHANGED)[wrong]()
    words = (str(k.dtype) if k.dtype!=mx.float32 or k.dtype!=v.dtype else str(k.shape[-1]) if wrong in CHANGED else tuple(k.shape))
    refused(c, k, v, case.method, words)
    assert mx.array_equal(call(c, y), call(other, y)) and stored(c)==stored(other)

@one
@pytest.mark.parametrize('wrong', WRONG)
def test_a_first_call_that_is_refused_fixes_nothing(case, wrong):
    c = case.create()
    refused(c, *WRONG[wrong](), case.method)
    assert c.empty() and c.shape is None
    x = rows(40, B=3, D=64).astype(mx.float16)
    feed(c, x)
    assert c.shape==(3,H,64,64) and c.offset==40

@over(FEW, lambda t: not t.ranks_nan)
@pytest.mark.parametrize('n', [0,20,T])
def test_numbers_that_are_not_finite(case, n):
    "On either side, in the first, a middle or the last token; the message says which positions arrived"
    c = filled(case, rows(n)) if n else case.create()
    for L in 1, 30:
        y = rows(L, seed=2)
        for i,value in enumerate(NOT_FINITE):
            at = (0, i%H, (0, L//2, L-1)[i], 7*i)
            for k,v in ((spoilt(y.k, at, value), y.v), (y.k, spoilt(y.v, at, value))): refused(c, k, v, case.method, n, n+L-1)
    assert mx.isfinite(feed(c, rows(40, seed=3))[0]).all()

@few
def test_a_refusal_in_a_half_filled_block(case):
    "Nothing of the refused call is in the tail, in a block or in a count"
    a, b, x = case.create(), case.create(), rows()
    for i in range(0, T, 29):
        y = x[i:i+29]
        feed(a, y)
        if case.traits.ranks_nan: refused(b, y.k, y.v[:,:,:3])
        else: refused(b, spoilt(y.k, (0,0,y.n-1,0), mx.nan), y.v)
        feed(b, y)
    assert stored(a)==stored(b)

# --- limits

@over(FEW, lambda t: not t.evicts)
def test_capacity(case):
    "As many tokens as it says, in any calls; one more names the field, what it would have to be, and what it is"
    for chunks in (T,), (200,T-200), chunks_of(T, 40):
        c = case.create(capacity=T)
        feed(c, rows(), chunks)
        for n in 1, 5: refused(c, *list(step(n=n))[1:], 'capacity', T+n, T)
        assert c.offset==T
    c = case.create(capacity=T-1)
    refused(c, *list(rows())[1:], 'capacity', T, T-1)
    feed(c, rows(T-1))
    if case.traits.trimmable:
        c.trim(10)
        feed(c, rows(10))
    assert c.offset==T-1

@over(FEW, lambda t: t.evicts)
def test_capacity_is_met_by_selecting_early(case):
    c = filled(case, rows(1500), chunks_of(1500, 100), capacity=1200)
    assert c.offset==1500 and c.size()<=1200

@over(FEW, lambda t: not t.evicts)
def test_capacity_survives_a_file(case):
    c = filled(case, capacity=T)
    again = type(c).from_state(c.state)
    refused(again, *list(step())[1:], 'capacity', T)

@over(FEW, lambda t: not t.evicts)
def test_fused_sdpa_max_ctx(case):
    "A limit of that path only: of calls with several tokens on what is stored already"
    c = filled(case, rows(100), fused_sdpa=True, fused_sdpa_max_ctx=150)
    refused(c, *list(rows(51))[1:], 'fused_sdpa_max_ctx', 151, 150)
    feed(c, rows(50))
    refused(c, *list(rows(2))[1:], 'fused_sdpa_max_ctx', 152, 150)
    call(c, step())
    assert c.offset==151
    c = filled(case, rows(100), fused_sdpa=False, fused_sdpa_max_ctx=150)
    feed(c, rows(60))
    assert c.offset==160

@pytest.mark.skipif(mx.default_device().type==mx.gpu, reason='the device has kernels')
@few
def test_kernels_that_are_required_and_absent(case):
    with pytest.raises(RuntimeError, match='^use_metal_kernels=True.*'+case.method) as e: case.create(use_metal_kernels=True)
    assert '\n' not in str(e.value)
    x, y = rows(100), step()
    outs = [call(filled(case, x, use_metal_kernels=o), y) for o in (None, False)]
    assert mx.array_equal(*outs)
