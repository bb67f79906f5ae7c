"The decode attention kernel in the emulator against the array operations."
import copy, dataclasses, itertools, math, re
import mlx.core as mx
import numpy as np
import pytest
from emulated import emulated
from emulator import DataRace, DivergentBarrier, EmulatorError, OutOfBounds, UnwrittenOutput
from veloxquant_mlx.engine.attention import attend_part, merge_parts
from veloxquant_mlx.kernels import attention
from veloxquant_mlx.kernels.attention import Side, decode_attention
from veloxquant_mlx.kernels.runtime import use_backend
from veloxquant_mlx.kernels.snippets import exact_rows, per_channel, per_token
from veloxquant_mlx.ops.affine import dequantize_per_channel, dequantize_per_token, quantize_per_channel, quantize_per_token

layouts = pytest.mark.parametrize('layout', ['cuda', 'metal'])

# --- one side of a cache

CODECS = dict(token=(quantize_per_token, dequantize_per_token, per_token), channel=(quantize_per_channel, dequantize_per_channel, per_channel))

TILE = 32 # packed arrays have room for whole tiles of so many tokens

def draw(rng, *shape, dtype=mx.float16): return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

def side(x, # (B, H, T, D)
    kind='token', # or 'channel', 'exact'
    n_bits=4, group_size=32,
    origin=0, # first rows that stay exact
    n=None, # packed rows, None: all others
    slack=None # rows behind them, of a forgotten past; None: to whole tiles, and a tile more
):
    "Where rows lie, and the float32 rows that are read"
    B, H, T, D = x.shape
    n = T-origin if n is None else n
    sink, rows, tail = (mx.contiguous(x[:, :, a:b]) for a,b in ((0, origin), (origin, origin+n), (origin+n, T)))
    exact = dict(origin=origin, n_packed=n, sink=sink if origin else None, tail=tail)
    if not n: return Side(D, **exact), x.astype(mx.float32)
    if slack is None: slack = -n%math.lcm(TILE, group_size)+math.lcm(TILE, group_size)
    rows = mx.concatenate([rows, mx.broadcast_to(50.*mx.arange(D), (B, H, slack, D)).astype(x.dtype)], axis=2)
    if kind=='exact': arrays, decoded, snippet = (rows,), rows.astype(mx.float32), exact_rows(D, rows.dtype==mx.float16)
    else:
        quantize, dequantize, maker = CODECS[kind]
        arrays = tuple(map(mx.contiguous, quantize(rows, n_bits, group_size)))
        decoded, snippet = dequantize(*arrays, n_bits, group_size, D), maker(n_bits, group_size, D)
    read = mx.concatenate([sink.astype(mx.float32), decoded[:, :, :n], tail.astype(mx.float32)], axis=2)
    return Side(D, snippet, arrays, **exact), read

def reference(q, keys, values, scale, mask=None, sinks=None, lo=0, hi=None):
    "Output and log-sum-exp in float32"
    T, L = keys.shape[2], q.shape[2]
    hi = hi or T
    if mask is None: mask = mx.arange(lo, hi)[None] <= mx.arange(hi-L, hi)[:, None]
    out, lse = attend_part(q, keys[:, :, lo:hi], values[:, :, lo:hi], scale, mask)
    if sinks is None: return out, lse
    return merge_parts([(out, lse)], sinks), mx.logaddexp(lse, sinks[:, None, None])

def doubles(*arrays): return (np.array(o.astype(mx.float32)).astype(np.float64) for o in arrays)

def distance(got, want):
    "Relative to the norm of all"
    got, want = doubles(got, want)
    return np.linalg.norm(got-want)/np.linalg.norm(want)

def error(got, want):
    "The worst vector on the last axis, relative to itself or the typical one"
    got, want = doubles(got, want)
    norm = lambda o: np.sqrt((o**2).sum(-1))
    return (norm(got-want)/np.maximum(norm(want), np.sqrt((norm(want)**2).mean()))).max()

def assert_attends(got, want, bound=1e-3, lse=2e-3):
    assert np.isfinite(np.array(got[0].astype(mx.float32))).all()
    assert error(got[0], want[0]) < bound
    assert np.abs(np.array(got[1]-want[1])).max() < lse

# --- combinations

FACTORS = dict(
    key=['token', 'channel', 'exact'], key_bits=[4, 2, 3, 8, 1, 5, 6, 7], key_group=[32, 16, 64, 128, 8, 48],
    value=['token', 'channel', 'exact'], value_bits=[4, 2, 3, 8, 1, 5, 6, 7], value_group=[32, 16, 64, 128, 8, 24],
    dim=[128, 64, 80, 96, 256], value_dim=[128, 64, 80, 96, 256], n_rep=[1, 3, 4, 8], B=[1, 2], H=[1, 2, 3], T=[113, 482, 61, 17, 1],
    L=[1, 2, 3, 4, 8, 33], origin=[0, 1, 5, 16], packed=[(1., 1.), (.9, .5), (.3, .8), (0., 1.), (1., .2), (.6, 0.)], part=[False, True],
    mask=[None, 'bool', 'heads', 'padding', 'additive'], sinks=[False, True], scores=[False, True], n_split=[None, 1, 2, 5],
    dtype=[mx.float16, mx.bfloat16, mx.float32], exact_dtype=[mx.float16, mx.bfloat16, mx.float32], out=[mx.float32, mx.float16])

Case = dataclasses.make_dataclass('Case', FACTORS, frozen=True)

def pairs(case): return {((f, str(a)), (g, str(b))) for (f,a),(g,b) in itertools.combinations(vars(case).items(), 2)}

def cover(n, tries=60, seed=0):
    "n combinations, each of which brings as many new pairs of values as it can"
    rng, seen, out = np.random.default_rng(seed), set(), []
    for _ in range(n):
        found = [Case(**{k: v[rng.integers(len(v))] for k,v in FACTORS.items()}) for _ in range(tries)]
        out.append(max(found, key=lambda c: len(pairs(c)-seen)))
        seen |= pairs(out[-1])
    return out

CASES = cover(44)

def test_combinations_cover_all_values():
    for k,v in FACTORS.items(): assert {str(getattr(c, k)) for c in CASES}=={str(o) for o in v}, k

def make_mask(kind, rng, B, H_q, L, n):
    "Masks of every form; the last position stays visible, so that no row is empty"
    if kind is None: return None
    if kind=='padding': # each batch row begins later
        return (mx.arange(n) >= mx.minimum(mx.array([3, 40][:B]), n-1)[:, None])[:, None, None]
    shape = dict(bool=(L, n), heads=(B, H_q, L, n), additive=(1, 1, L, n))[kind]
    visible = rng.random(shape)<.7
    visible[..., -1] = True
    if kind=='bool': return mx.array(visible)
    return mx.array(np.where(visible, rng.standard_normal(shape), -np.inf).astype(np.float32))

def n_packed(kind, group_size, T, origin, share):
    "Groups of tokens are whole"
    n = round(share*max(0, T-origin))
    return n//group_size*group_size if kind=='channel' else n

def with_splits(monkeypatch, n):
    "Cut the tokens into n parts, be they more than there are units of work"
    whole = attention.plan
    def plan(*args):
        p = whole(*args)
        return dataclasses.replace(p, n_split=n, params=mx.concatenate([mx.array([n], mx.int32), p.params[1:]]))
    monkeypatch.setattr(attention, 'plan', plan)

@pytest.mark.parametrize('i,layout', [(i, l) for i in range(len(CASES)) for l in (('cuda', 'metal') if i%4==0 else ('metal', 'cuda')[i%2:][:1])])
def test_combination(i, layout, monkeypatch):
    c, rng = CASES[i], np.random.default_rng(i)
    if c.n_split: with_splits(monkeypatch, c.n_split)
    B, H, H_q, T, L = c.B, c.H, c.H*c.n_rep, c.T, min(c.L, c.T)
    origin, scale = min(c.origin, T), c.dim**-.5
    sides, reads = [], []
    for kind,bits,g,dim,share in ((c.key, c.key_bits, c.key_group, c.dim, c.packed[0]), (c.value, c.value_bits, c.value_group, c.value_dim, c.packed[1])):
        if kind=='channel': g = max(16, g//16*16)
        x = draw(rng, B, H, T, dim, dtype=c.exact_dtype)+mx.array(rng.standard_normal(dim), c.exact_dtype)
        s, read = side(x, kind, bits, g, origin, n_packed(kind, g, T, origin, share))
        sides.append(s)
        reads.append(read)
    q = draw(rng, B, H_q, L, c.dim, dtype=c.dtype)
    hi = T-T//7 if c.part else T
    lo = T//5 if c.part and T//5+L<=hi else 0
    L = min(L, hi)
    q = mx.contiguous(q[:, :, :L])
    mask, sinks = make_mask(c.mask, rng, B, H_q, L, hi-lo), mx.array(rng.standard_normal(H_q)*3, mx.float32) if c.sinks else None
    scores = c.scores and (L==1 or mask is not None) # the causal rule leaves invisible scores unwritten
    with use_backend(emulated(layout, order='forward' if i%2 else i)):
        got = decode_attention(q, *sides, scale, mask, sinks, lo, hi if c.part else None, dtype=c.out, with_scores=scores)
    want = reference(q, *reads, scale, mask, sinks, lo, hi)
    assert got[0].dtype==c.out and got[0].shape==(B, H_q, L, c.value_dim) and got[1].shape==(B, H_q, L, 1)
    assert_attends(got, want)
    if not scores: return
    n = hi-lo
    plain = (q.astype(mx.float32).reshape(B, H, -1, c.dim)@mx.swapaxes(reads[0][:, :, lo:hi], -1, -2)).reshape(B, H_q, L, n)*scale
    if mask is not None: plain = mx.where(mask, plain, -1e30) if mask.dtype==mx.bool_ else plain+mask
    seen = np.broadcast_to(np.array(plain)>-1e29, got[2].shape)
    assert np.abs(np.array(got[2])-np.array(plain))[seen].max() < 4e-3
    assert np.array(got[2])[~seen].max(initial=-2e30) < -9e29
    mass = mx.exp(got[2]-got[1]).sum(-1)
    if sinks is not None: mass += mx.exp(sinks[:, None]-got[1][..., 0])
    assert np.abs(np.array(mass)-1).max() < 1e-3

# --- single properties

def small(rng, B=1, H=2, n_rep=4, L=1, T=113, dim=64, value_dim=None, n=None, n_value=None, growth=1, **kw):
    "Queries, and two sides of 4 bits with the rows that are read; growth: how much larger the last key is than the first"
    k, v = (draw(rng, B, H, T, d) for d in (dim, value_dim or dim))
    k = k*mx.linspace(1, growth, T)[:, None].astype(k.dtype)
    (keys, k), (values, v) = side(k, n=n, **kw), side(v, n=n if n_value is None else n_value, **kw)
    return draw(rng, B, H*n_rep, L, dim), keys, values, k, v

@pytest.fixture
def rng(request): return np.random.default_rng(list(request.node.originalname.encode()))

@layouts
@pytest.mark.parametrize('n', [2, 40, 77])
def test_splits_without_work(rng, layout, n, monkeypatch):
    "More than the merge kernel reads at once, too"
    q, keys, values, k, v = small(rng, L=2)
    sinks = mx.array(rng.standard_normal(8), mx.float32)
    with_splits(monkeypatch, n)
    with use_backend(emulated(layout)): assert_attends(decode_attention(q, keys, values, .125, sinks=sinks), reference(q, k, v, .125, sinks=sinks))

@layouts
def test_rows_do_not_depend_on_the_call(rng, layout, monkeypatch):
    "Fewer heads, another batch row or another number of splits: equal up to the order of sums"
    q, keys, values, k, v = small(rng, B=2, L=3)
    one = lambda s: dataclasses.replace(s, packed=tuple(a[1:] for a in s.packed), tail=s.tail[1:])
    with use_backend(emulated(layout)):
        a = decode_attention(q, keys, values, .125)
        b = decode_attention(mx.contiguous(q[1:]), one(keys), one(values), .125)
        with_splits(monkeypatch, 5)
        c = decode_attention(q, keys, values, .125)
    assert (a[0][1:]==b[0]).all().item() and error(c[0], a[0])<1e-3

@layouts
def test_mask_that_hides_everything(rng, layout):
    "A bool mask gives the mean of the values, as `mx.fast.scaled_dot_product_attention` does"
    q, keys, values, k, v = small(rng, L=2, origin=3, n=90)
    mask = mx.array(rng.random((2, 113))<.5)
    mask[1] = False
    with use_backend(emulated(layout)): got = decode_attention(q, keys, values, .125, mask)[0]
    want = mx.fast.scaled_dot_product_attention(q.astype(mx.float32), k, v, scale=.125, mask=mask)
    assert error(got[:, :, :1], want[:, :, :1])<2e-3 and error(got[:, :, 1:], want[:, :, 1:])<2e-3

def as_multiplied(q):
    "Queries as kernels round them, for a scale of 1/8"
    per_bit = .125*math.log2(math.e)
    return (q.astype(mx.float32)*per_bit).astype(mx.float16).astype(mx.float32)/per_bit

@layouts
@pytest.mark.parametrize('loud', ['query', 'key'])
def test_large_scores(rng, layout, loud):
    "Scores of ±200: no overflow, and nothing but the rounding of the query is lost"
    B, H, T, D = 1, 1, 61, 64
    k = mx.array(rng.integers(0, 16, (B, H, T, D))-7.5, mx.float16)*.25 # exact in 4 bits
    k[..., ::32], k[..., 1::32] = -7.5*.25, 7.5*.25
    v = draw(rng, B, H, T, D)
    q = draw(rng, B, 2, 3, D)
    top = lambda: mx.abs((q[:, :, None].astype(mx.float32)*.125).reshape(-1, D)@k[0, 0].astype(mx.float32).T).max()
    factor = 200/top().item()
    if loud=='key': factor, k = 1, k*2**round(math.log2(factor))
    q = (q*factor).astype(mx.float32)
    (keys, k), (values, v) = side(k, n=48), side(v, n=48)
    assert 120<=top().item()<=300
    with use_backend(emulated(layout)): got = decode_attention(q, keys, values, .125)
    assert_attends(got, reference(as_multiplied(q), k, v, .125))

@layouts
@pytest.mark.parametrize('kind', ['token', 'channel', 'exact'])
def test_values_at_the_limit_of_half(rng, layout, kind):
    "Packed and exact rows of ±60,000"
    v = mx.array(rng.choice([-6e4, 6e4, 100, 0.], (1, 1, 80, 64)), mx.float16)
    v[..., ::16], v[..., 1::16] = -6e4, 6e4
    (keys, k), (values, v) = side(draw(rng, 1, 1, 80, 64), n=48), side(v, kind, 4, 16, n=48)
    q = draw(rng, 1, 4, 1, 64)
    with use_backend(emulated(layout)): got = decode_attention(q, keys, values, .125)
    assert_attends(got, reference(q, k, mx.clip(v, -65504, 65504), .125))

@layouts
def test_exact_rows_beyond_half(rng, layout):
    "They are read as ±65504"
    v = draw(rng, 1, 1, 61, 64, dtype=mx.float32)
    v[:, :, ::7, ::5] = mx.array(rng.choice([-1e30, 1e30, 65519.9, -65530], v[:, :, ::7, ::5].shape), mx.float32)
    (keys, k), (values, v) = side(draw(rng, 1, 1, 61, 64), n=16), side(v, n=0)
    q = draw(rng, 1, 1, 1, 64)
    with use_backend(emulated(layout)): got = decode_attention(q, keys, values, .125)
    assert_attends(got, reference(q, k, mx.clip(v, -65504, 65504), .125))

@layouts
@pytest.mark.parametrize('before', [0, 64, 71])
def test_own_rows_and_stored_rows(rng, layout, before):
    "A call's own rows apart from those before it, merged: as a cache reads a call of a few tokens"
    L = 6
    q, keys, values, k, v = small(rng, L=L, T=before+L, n=before)
    own = [mx.contiguous(x[:, :, before:]).astype(mx.float16) for x in (k, v)]
    with use_backend(emulated(layout)):
        parts = [decode_attention(q, Side(64, origin=before, tail=own[0]), Side(64, origin=before, tail=own[1]), .125, lo=before, hi=before+L)]
        if before: parts.append(decode_attention(q, keys, values, .125, lo=0, hi=before, n_token=before+L))
    assert error(merge_parts(parts), reference(q, k, v, .125)[0])<2e-3

@layouts
def test_sides_that_begin_at_different_tiles(rng, layout):
    "A sliding window may have freed more of one side"
    q, keys, values, k, v = small(rng, T=113, n=96)
    rows = draw(rng, 1, 2, 113, 64)
    values, v = side(rows, origin=32, n=70)
    values.sink = None
    keys.sink, lo = None, 32
    with use_backend(emulated(layout)): got = decode_attention(q, keys, values, .125, lo=lo)
    assert_attends(got, reference(q, k, v, .125, lo=lo))

# --- tests of the test: mistakes in the real text are found

PLACES = dict(attention=('attention_kernel', 'body'), splits=('attention_kernel', 'body'), codec=('attention_kernel', 'header'), merge=('merge_kernel', 'body'))

def edited(monkeypatch, place, # see `PLACES`
    old, new, # a part of the text, as a pattern if it is compiled, and what takes its place
    which=None # of several such parts, from 0; None: all of them
):
    "Make a mistake"
    maker, field = PLACES[place]
    make = getattr(attention, maker)
    def changed(*args, **kw):
        k = make(*args, **kw)
        text, pattern = getattr(k, field), old if isinstance(old, re.Pattern) else re.compile(re.escape(old))
        places = list(pattern.finditer(text))
        if len(places)<=(which or 0): raise LookupError(f'the text of the {place} has no {old!r} any more: change this test with it')
        for m in places[::-1] if which is None else [places[which]]: text = text[:m.start()]+m.expand(new)+text[m.end():]
        k = copy.copy(k)
        setattr(k, field, text)
        return k
    monkeypatch.setattr(attention, maker, changed)

def attends(monkeypatch, n_split, layout='cuda'):
    "A small call against the reference; scores grow so much that sums are rescaled on the way"
    q, keys, values, k, v = small(np.random.default_rng(0), n_rep=3, L=3, T=200, origin=3, n=150, n_value=130, growth=8)
    with_splits(monkeypatch, n_split)
    with use_backend(emulated(layout)): got = decode_attention(q, keys, values, .125)
    assert_attends(got, reference(as_multiplied(q), k, v, .125), 3e-3, 1e-2) # of scores up to 30

WRONG = (EmulatorError, AssertionError)
BARRIER = 'threadgroup_barrier(mem_flags::mem_threadgroup);'
CLAMP = re.compile(r'min\(max\(([\w +]+), lo\), hi - 1\)')
MISTAKES = dict( # place, old, new, which, error; one barrier only is needed by tables of levels, and tested with the methods that have them
    barrier_before_maxima_are_read=('attention', BARRIER, '', 1, DataRace), barrier_between_simdgroups=('attention', BARRIER, '', 2, DataRace),
    barrier_of_merge=('merge', BARRIER, '', None, DataRace), barrier_of_one_simdgroup=('attention', BARRIER, 'simdgroup_barrier(mem_flags::mem_threadgroup);', 1, DataRace),
    divergent_collective=('attention', re.compile(r'simd_any(\(max\(.* > LIMIT\))'), r'\1', None, DivergentBarrier),
    no_clamp_of_exact_rows=('codec', CLAMP, r'\1', None, OutOfBounds),
    half_a_clamp=('codec', CLAMP, r'max(\1, lo)', None, OutOfBounds),
    word_stride=('codec', 'row * WORDS', 'row * (WORDS + 1)', None, WRONG), scale_stride=('codec', 'row * GROUPS', 'row * (GROUPS + 1)', None, WRONG),
    head_stride=('codec', 'params[18] * ', 'params[18] * 2 * ', None, OutOfBounds),
    capacity_of_another_array=('codec', 'params[18] * ', 'params[1] * ', None, AssertionError),
    head_of_a_tail=('attention', 'k_tail + (size_t)bh * params[7] * KD', 'k_tail + (size_t)bh * params[6] * KD', None, AssertionError),
    head_of_a_sink=('attention', 'v_sink + (size_t)bh * n_sink * VD', 'v_sink + (size_t)bh * n_sink * VD + VD', None, OutOfBounds),
    channel_of_a_lane=('attention', 'VC = g * VN', 'VC = g * (VN + 1)', None, WRONG),
    no_row_guard=('attention', 'n_row = min(8, rows - row0)', 'n_row = 8', None, EmulatorError), no_row_guard_of_splits=('splits', 'n_row = min(8, rows - row0)', 'n_row = 8', None, EmulatorError),
    row_guard_of_maxima=('splits', ' && (int)lane < n_row', '', None, EmulatorError),
    unwritten_rows=('splits', 'i < n_row * VD', 'i < (n_row - 1) * VD', 1, EmulatorError), unwritten_rows_of_one=('attention', 'i < n_row * VD', 'i < (n_row - 1) * VD', 0, UnwrittenOutput), unwritten_maxima=('splits', 'lane < 8 && (int)lane', 'lane < 7 && (int)lane', None, EmulatorError),
    not_the_last=('splits', re.compile(r'if .last_one.*\) {'), 'if (split == 0) {', None, WRONG), marks_stay=('splits', 'i < 2 * n_split', 'i < n_split', None, UnwrittenOutput),
    split_behind_the_last=('splits', 's + k < n_split', 's + k <= n_split', None, WRONG), split_left_out=('splits', 's + k < n_split', 's + k < n_split - 1', None, AssertionError), no_weight=('splits', 'one * x[k][c]', 'x[k][c]', None, AssertionError),
    no_causal_rule=('attention', ' || pos > s_last[2 * t + (i & 1)]', '', None, AssertionError), causal_rule_off_by_one=('attention', 'pos > s_last[2 * t + (i & 1)]', 'pos > s_last[2 * t + (i & 1)] + 1', None, AssertionError),
    no_end_of_segment=('attention', re.compile(r'pos >= \w+\.hi'), 'false', None, AssertionError), no_begin_of_segment=('attention', re.compile(r'pos < \w+\.lo'), 'false', None, AssertionError),
    maxima_of_half_the_lanes=('attention', 'hi0 = max(max(hi0, simd_shuffle_xor(hi0, ROW_XOR_2)), under[0] + 8.f)', 'hi0 = max(hi0, under[0] + 8.f)', None, AssertionError),
    no_rescaling=('attention', 'o[j][0] *= f0;', '', None, AssertionError), no_factor_of_simdgroups=('attention', '* factor[i & 1]', '', None, AssertionError),
    one_simdgroup_forgotten=('attention', 'for (int w = 0; w < N_WARPS; ++w) {', 'for (int w = 0; w < N_WARPS - 1; ++w) {', None, AssertionError),
    split_past_the_last=('merge', 's < n_split', 's <= n_split', None, EmulatorError), split_forgotten=('merge', 's < n_split', 's < n_split - 1', None, AssertionError),
    no_weight_of_splits=('merge', 'fast_exp2(w[k] - all)', '1.f', None, AssertionError))

@layouts
@pytest.mark.parametrize('n_split', [1, 3])
def test_without_a_mistake(layout, n_split, monkeypatch): attends(monkeypatch, n_split, layout)

@pytest.mark.parametrize('name', MISTAKES)
def test_mistake(name, monkeypatch):
    "Each is found, as the error that says what it is where the emulator can know"
    *mistake, found = MISTAKES[name]
    edited(monkeypatch, *mistake)
    with pytest.raises(found): attends(monkeypatch, 3 if mistake[0] in ('merge', 'splits') else 1, 'metal' if mistake[0]=='merge' else 'cuda')

def test_buffer_without_room(rng):
    "Tiles are read to their end"
    keys, k = side(draw(rng, 1, 1, 61, 64), slack=0)
    values, v = side(draw(rng, 1, 1, 61, 64))
    with use_backend(emulated()), pytest.raises(ValueError, match=r'whole tiles of \d+ tokens .got 61 rows'): decode_attention(draw(rng, 1, 1, 1, 64), keys, values, .125)
