"What is stored: the same for every chunking, row by row in a batch, whatever the dtype; copies, files, trimming, bytes."
import copy, gc
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
from cases import *

each, few, one = over(CASES), over(FEW), over(ONE)

def go_on(c, seed=3):
    "Outputs of further calls"
    x, outs, at = rows(44, B=c.shape[0], D=c.shape[2], D_v=c.shape[3], seed=seed), [], 0
    for n in (1,1,5,1,35,1): outs, at = [*outs, call(c, x[at:at+n])], at+n
    mx.eval(outs, c.state)
    return outs

def same(a, b): return all(mx.array_equal(x, y) for x,y in zip(a, b, strict=True))

# --- how tokens arrive does not matter

def in_order(c):
    "A copy whose rows lie in the order of their positions: where a cache has dropped single rows, their order has no meaning"
    c = copy.deepcopy(c)
    if c.free is not None: c.tidy()
    return c

def differ(a, b, case):
    "Indices of the arrays in which two states differ; sums of scores may by rounding"
    if not case.traits.evicts: return [i for i,(x,y) in enumerate(zip(stored(a), stored(b), strict=True)) if x!=y]
    equal = lambda x, y: close(x, y, 1e-4) if mx.issubdtype(x.dtype, mx.floating) else mx.array_equal(x, y)
    return [i for i,(x,y) in enumerate(zip(in_order(a).state, in_order(b).state, strict=True)) if not equal(x, y)]

def chunked(case, x, *chunkings):
    "Which chunkings leave another state than a prompt in one call, and in what"
    once = filled(case, x)
    return {len(chunks): d for chunks in chunkings if (d := differ(filled(case, x, chunks), once, case))}

@each
def test_chunking_does_not_change_what_is_stored(case):
    "Bit for bit"
    assert not chunked(case, rows(), (1,)*T, chunks_of(T, 7), (T-1,1), (31,1,128,130))

@few
def test_chunking_with_ties(case):
    "On a coarse grid, where many sums are exactly 0 and fall between two codes"
    assert not chunked(case, rows(grid=32), chunks_of(T, 7), (T-1,1), (31,1,128,130))

@over(FEW, lambda t: t.prompt_end)
def test_an_open_prompt_is_read_exactly(case):
    x = rows()
    want = causal(x)
    for chunks in chunks_of(T, 7), (T-1,1): assert close(mx.concatenate(feed(case.create(), x, chunks), axis=2), want)

@few
def test_rows_of_a_batch_are_independent(case):
    "Each row stores and reads what it does alone"
    x, y = rows(B=2), step(5, B=2)
    both = filled(case, x)
    got = call(both, y)
    for i in 0,1:
        alone = filled(case, x.batch(i))
        assert close(got[i:i+1], call(alone, y.batch(i)))
        assert both.used_nbytes==2*alone.used_nbytes or case.traits.uneven_heads and 0<=both.used_nbytes/alone.used_nbytes-2<.05
        for a,b in zip(decoded(both), decoded(alone)):
            fill = a.shape[2]-b.shape[2] # rows in front that are nobody's, where one row of a batch, or a head of it, keeps fewer tokens than another
            assert not fill or (both.row_positions()[i,:,:fill]<0).all()
            assert close(a[i:i+1,:,fill:], b) or case.traits.draws_rows

@few
@pytest.mark.parametrize('dtype', [mx.float16, mx.bfloat16], ids=['float16','bfloat16'])
def test_dtype_of_the_model(case, dtype):
    "The same arithmetic for the same numbers: codes and scales are equal, and exact rows are but for their dtype"
    x = rows()
    a, b = filled(case, x), filled(case, x.astype(dtype))
    assert all(o.dtype in (mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.int32, mx.bool_, mx.float16, mx.float32, dtype) for o in b.state)
    for p,q in zip(a.state[2:], b.state[2:], strict=True): assert p.shape==q.shape and mx.array_equal(p.astype(mx.float32), q.astype(mx.float32))
    p, q = (np.array(o.state[0]).tolist() for o in (a, b))
    assert [i for i,(m,n) in enumerate(zip(p, q, strict=True)) if m!=n]==[6] # the header's code of the dtype

@few
def test_dtype_of_exact_rows(case):
    "`dtype` is that of stored rows; outputs, and queries that stay with a cache, keep the queries'"
    x = rows()
    a, b, y = filled(case, x, dtype=mx.float16), filled(case, x.astype(mx.float16)), step()
    noted = [getattr(c, 'ring', None) for c in (a, b)]
    assert a.used_nbytes-b.used_nbytes==(0 if noted[0] is None else noted[0].nbytes-noted[1].nbytes)
    out = call(a, y)
    assert out.dtype==mx.float32 and close(out, call(b, y.astype(mx.float16)), 4e-3)

@few
@pytest.mark.parametrize('dtype,size', [(mx.float16,6e4), (mx.bfloat16,1e6), (mx.float32,1e6)], ids=['float16','bfloat16','float32'])
def test_large_numbers_stay_finite(case, dtype, size):
    "Scales and zero points are fp16: what is beyond its range becomes its largest number"
    x = rows()
    x = Rows(x.q/100, *(mx.sign(o)*mx.minimum(mx.abs(o)*size, size) for o in (x.k, x.v))).astype(dtype)
    c = filled(case, x)
    assert all(mx.isfinite(o).all() for o in c.state if mx.issubdtype(o.dtype, mx.floating)) and all(mx.isfinite(o).all() for o in decoded(c))

@few
@pytest.mark.filterwarnings('ignore:.*constant vector')
@pytest.mark.parametrize('value', [0., 3.5])
def test_constant_rows(case, value):
    "Nothing is divided by a range of 0, and zeros come back as zeros"
    c, x = case.create(), rows()
    feed(c, Rows(x.q, *(mx.full(o.shape, value) for o in (x.k, x.v))))
    for o in decoded(c): assert mx.isfinite(o).all() and (value or not o.any())
    assert mx.isfinite(call(c, step())).all()

# --- seeds

@over(FEW, lambda t: t.seed)
def test_seeds(case):
    x, field = rows(), case.traits.seed
    a, b, c = filled(case, x), filled(case, x), filled(case, x, **{field: 7})
    for i in range(40 if case.traits.draws_rows else 0): # lots of decode steps
        for o in a, b, c: mx.eval(call(o, x[i:i+1]))
    assert stored(a)==stored(b)
    random = dict(case.given).get('gear_rank')!=0 # without a low-rank term nothing is drawn
    assert (snapshot(a.state[2:])!=snapshot(c.state[2:]))==random

@few
def test_nothing_else_is_random(case):
    x = rows()
    mx.random.seed(0); np.random.seed(0)
    a = filled(case, x)
    mx.random.seed(1); np.random.seed(1)
    assert stored(filled(case, x))==stored(a)

# --- files and copies

@each
@pytest.mark.parametrize('n', [20,T])
def test_save_and_load(case, n, tmp_path):
    "The continuation is identical, bit for bit"
    c, path = filled(case, rows(n)), str(tmp_path/'cache.safetensors')
    save_prompt_cache(path, [c, c])
    loaded, second = load_prompt_cache(path)
    assert type(loaded) is type(c) and stored(loaded)==stored(c)
    want = go_on(c)
    assert same(go_on(loaded), want) and same(go_on(second), want)

@few
def test_from_state(case):
    c = filled(case)
    again, older = type(c).from_state(c.state), type(c).from_state(c.state, c.meta_state)
    set_ = case.create()
    set_.state = c.state
    want = go_on(c)
    for o in again, older, set_:
        assert o.source_dtype==c.source_dtype and same(go_on(o), want) and stored(o)==stored(c)

@few
def test_state_of_an_empty_cache(case):
    c = case.create()
    again = type(c).from_state(c.state)
    assert again.empty() and again.offset==again.nbytes==0
    x = rows(50)
    assert same(feed(again, x), feed(c, x)) and stored(again)==stored(c)

@few
def test_state_is_arrays_only(case):
    for c in case.create(), filled(case):
        assert type(c.state) is list and len(c.state)>=2 and all(type(o) is mx.array for o in c.state)
        assert c.state[0].dtype==mx.int64 and c.state[1].dtype==mx.uint8

@few
@pytest.mark.parametrize('n', [20,T])
def test_copies_are_independent(case, n):
    "Appending to one leaves the arrays of the other as they are, in both directions"
    c = filled(case, rows(n))
    before, new = stored(c), copy.deepcopy(c)
    assert stored(new)==before
    went = go_on(new)
    assert stored(c)==before
    new = copy.deepcopy(c)
    assert same(go_on(c), went) and stored(new)==before
    assert same(go_on(new), went) and stored(new)==stored(c)
    if case.traits.trimmable:
        new.trim(n+44)
        assert new.empty() and c.offset==n+44

@one
def test_copies_of_an_empty_cache(case):
    c = case.create()
    new = copy.deepcopy(c)
    feed(new, rows(20))
    assert c.empty() and c.nbytes==0 and new.offset==20

# --- trimming

@over(FEW, lambda t: t.trimmable)
def test_trim(case):
    "Exactly min(n, T) tokens go; the others are what attention read before, bit for bit where that was exact"
    x = rows()
    full = filled(case, x)
    assert full.is_trimmable() and case.create().is_trimmable()
    before, original = decoded(full), (x.k, x.v)
    for n in (0, 1, 2, 7, 8, 31, 32, 33, 100, 128, 150, 200, 257, T-1, T, T+9):
        c, left = copy.deepcopy(full), max(0, T-n)
        assert c.trim(n)==min(n, T) and c.offset==c.size()==left and c.empty()==(left==0), n
        if left:
            for a,b,o in zip(decoded(c), before, original):
                assert close(a, b[:,:,:left]), n
                exact = (b[:,:,:left]==o[:,:,:left]).all(axis=-1)
                assert mx.array_equal(mx.where(exact[...,None], a, 0), mx.where(exact[...,None], o[:,:,:left], 0)), n
        again = type(c).from_state(c.state)
        for y in step(7), step(8, 40), step(9): out, same_out = call(c, y), call(again, y)
        assert c.offset==left+42 and close(out, attention(y.q, *decoded(c), reads(c, y))) and mx.array_equal(out, same_out), n

@over(FEW, lambda t: t.trimmable)
def test_trim_inside_the_exact_tail_leaves_no_trace(case):
    n = exact_tokens(case)
    if n<10: pytest.skip('packs at once')
    x = rows(n)
    if case.traits.prompt_end: # decoded tokens behind a prompt
        c, fresh = filled(case, x[:n-8]), filled(case, x[:n-8])
        for i in range(n-8, n): call(c, x[i:i+1])
    else: c, fresh = filled(case, x), filled(case, x[:n-8])
    assert c.trim(8)==8 and stored(c)==stored(fresh)
    assert same(go_on(c), go_on(fresh))

@over(FEW, lambda t: t.trimmable)
def test_trim_of_the_last_tokens_again_and_again(case):
    "As a rejected draft does"
    c, x = filled(case), rows(200, seed=2)
    for i in range(0, 200, 5):
        call(c, x[i:i+5])
        assert c.trim(3)==3
    assert c.offset==T+80 and all(mx.isfinite(o).all() for o in decoded(c))

@over(FEW, lambda t: t.trimmable)
def test_trim_of_everything_leaves_a_fresh_cache(case):
    "Tables that were fitted on forgotten tokens are forgotten too"
    c, x = filled(case), rows(200, seed=2)
    assert c.trim(T)==T and c.empty()
    feed(c, x, attend=sees_queries(c, case))
    assert stored(c)==stored(filled(case, x))

@over(FEW, lambda t: t.prompt_end)
def test_announcing_a_prompt_leaves_what_was_decided(case):
    "A segment that is due is made, whether somebody looked at the cache before the announcement or not"
    looked, not_looked, x, y = filled(case), filled(case), rows(200, seed=2), rows(50, seed=3)
    for n in (64, 128, 200):
        for i in range(looked.offset-T, n): call(looked, x[i:i+1]), call(not_looked, x[i:i+1])
        assert looked.nbytes
        a, b = copy.deepcopy(looked), not_looked
        for c in a, b: feed(c, y)
        assert stored(a)==stored(b), n
        not_looked = copy.deepcopy(looked)

@over(FEW, lambda t: not t.trimmable)
def test_trim_is_refused(case):
    c = filled(case)
    before = stored(c)
    assert not c.is_trimmable() and not case.create().is_trimmable()
    assert c.trim(0)==c.trim(5)==c.trim(T)==0 and stored(c)==before

# --- bytes

@each
def test_nbytes_counts_every_array(case):
    "All that can be reached from a cache, but for tables that other caches share with it"
    for n in (5, 40, T):
        c, other = filled(case, rows(n)), filled(case, rows(n, seed=1))
        own, shared = held(c), held(other)
        assert c.nbytes==sum(b for i,b in own.items() if i not in shared), n
        assert c.used_nbytes<=c.nbytes

@few
def test_bytes_of_nothing(case):
    c = case.create()
    assert c.nbytes==c.used_nbytes==c.fp16_nbytes==c.offset==c.size()==0 and c.empty()

@each
@pytest.mark.parametrize('dtype', [mx.float32, mx.float16], ids=['float32','float16'])
def test_formula(case, dtype):
    "The bytes of the method's page, within 3 %; where rows are forgotten, after a prompt of that length"
    if case.traits.evicts:
        any_, x = filled(case, rows(5).astype(dtype)), rows(600).astype(dtype)
        for n in (1, 31, 64, 128, 290, 599, 600): assert abs(filled(case, x[:n]).used_nbytes/any_.formula_nbytes(n)-1)<.03, n
        return
    c, x, at = case.create(), rows(600).astype(dtype), 0
    for n in (1, 30, 31, 32, 33, 48, 63, 64, 127, 128, 129, 200, 256, 300, 599, 600):
        feed(c, x[at:n], attend=sees_queries(c, case)); at = n
        assert abs(c.used_nbytes/c.formula_nbytes(n)-1)<.03, n

@over(CASES, lambda t: t.below_fp16)
@pytest.mark.parametrize('defaults', [False,True], ids=['small','defaults'])
def test_fewer_bytes_than_fp16(case, defaults):
    "Slack included; 8 bits too"
    cls = SERVABLE[case.method].cache_class
    own = cls.layer_fields(0) if cls.bit_field else () # the width of the case
    if defaults: case = Case(case.method, case.name, tuple(o for o in case.given if o[0] in (*own, 'calibrated')))
    c = filled(case, rows(2048, D=64), dtype=mx.float16)
    assert c.fp16_nbytes==2*2*2048*(64+64)
    half = case.traits.exact_values or any(k.endswith('_quantize_values') and v is False for k,v in case.given) # values stay as they are
    assert c.nbytes<(.95 if half or case.name=='8' else case.traits.most_bytes)*c.fp16_nbytes

@over(ONE, lambda t: not t.evicts)
def test_growth_is_linear(case):
    "Twice the tokens, twice the bytes; slack is an eighth and a few hundred rows"
    x, c, sizes, at = rows(4096), case.create(), {}, 0
    for n in (1024, 2048, 4096):
        feed(c, x[at:n], attend=sees_queries(c, case)); at = n
        sizes[n] = c.used_nbytes
        assert c.nbytes<=1.13*c.used_nbytes+300*c.used_nbytes/n, n
    assert abs((sizes[4096]-sizes[2048])/(2*(sizes[2048]-sizes[1024]))-1)<.15

@over(FEW, lambda t: t.evicts)
def test_bytes_are_bounded(case):
    c = filled(case, rows(1024))
    sizes = []
    for i in range(64):
        call(c, step(i))
        sizes.append(c.nbytes)
    assert sizes[-1]<used(c, 1024) and max(sizes)<=1.3*sizes[0]+300*sizes[0]/c.size()

@one
def test_appending_a_token_copies_a_constant_number_of_bytes(case):
    "Beyond what is held, 300 steps take the same memory at 4,000 tokens as at 1,000; buffers grow a few times only"
    c, x, work = case.create(), rows(4300), {}
    for start,at in (1000,0),(4000,1300):
        c.expect_prompt(start-at) # its end is not one of the steps
        call(c, x[at:start])
        mx.eval(c.state)
        taken, growths, size = 0, 0, c.nbytes
        for i in range(start, start+300):
            y = x[i:i+1]
            mx.eval(*y)
            gc.collect(0)
            base = mx.get_active_memory()
            mx.reset_peak_memory()
            handles = c.update_and_fetch(y.k, y.v)
            mx.eval(c.state)
            taken += mx.get_peak_memory()-base
            if c.needs_queries: mx.eval(mx.fast.scaled_dot_product_attention(y.q, *handles, scale=SCALE)) # reading is not what is measured
            del handles
            growths += c.nbytes>1.02*size
            size = max(size, c.nbytes)
        work[start] = taken/300
        assert growths<=4, start
    assert work[4000]<1.7*work[1000]+4096, work
