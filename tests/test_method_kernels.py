"Caches of every method that has kernels: in the emulator as with array operations."
import copy
from dataclasses import dataclass
import mlx.core as mx
import numpy as np
import pytest
from emulated import emulated
from emulator import DataRace
from test_attention_kernels import BARRIER, distance, edited, error, with_splits
from veloxquant_mlx.engine.hook import install
from veloxquant_mlx.engine.quantized import QuantizedCache
from veloxquant_mlx.engine.registry import methods
from veloxquant_mlx.kernels.runtime import Backend, use_backend
from veloxquant_mlx.ops.rope import RopeParams

MUST = {'kivi', 'kivi_sink', 'adakv', 'gear', 'turboquant_rvq', 'kvquant', 'kitty', 'skvq', 'turboquant_mse', 'turboquant_prod', 'qjl', 'polar', 'spectral', 'vecinfer', 'cachegen', 'xquant'} # have kernels

NO_LANES = dict(polar=(272, 288), vecinfer=(4, 512), xquant=(288, 320)) # head dimensions that kernels cannot read, for methods that do not have these
def no_lanes(method): return NO_LANES.get(method, (84, 264))

@pytest.fixture(autouse=True)
def hook(): install() # other tests of the process may have taken it away

# --- caches

def serving(name): # standalone methods by their serving class
    m = methods()[name]
    return m.cache_class.serving if m.standalone else m.cache_class

@dataclass(frozen=True)
class Case:
    method:str
    fields:tuple # of a cache
    dim:int = 64 # D
    value_dim:int = 64
    n_rep:int = 2
    B:int = 1
    rope:RopeParams|None = None
    close:bool = False # a few codes may differ: sums of another order fall to the other side of a midpoint
    def __str__(self): return '-'.join([self.method, *(f'{k.split("_")[-1]}{v}' for k,v in self.fields), f'D{self.dim}'])
    def cache(self, **kw):
        c = serving(self.method).of(**dict(self.fields)|dict(head_dim=self.dim, fused_sdpa=True)|kw)
        if self.rope: c.bind(layer=0, head_dim=self.dim, rope=self.rope, rope_unknown=False, keep_live=False, model='')
        return c

def case(method, dim=64, value_dim=None, n_rep=2, B=1, rope=None, **fields):
    return Case(method, tuple(fields.items()), dim, value_dim or dim, n_rep, B, rope, method=='turboquant_rvq')

kivi = lambda b, g=32, R=32, **kw: case('kivi', bit_width_inlier=b, kivi_group_size=g, residual_length=R, **kw)
kivi_sink = lambda b=2, g=32, R=32, **kw: case('kivi_sink', bit_width_inlier=b, kivi_group_size=g, residual_length=R, **kw)
adakv = lambda R=32, **kw: case('adakv', residual_length=R, **kw)
rvq = lambda b, **kw: case('turboquant_rvq', bit_width_inlier=b, **kw)
gear = lambda **kw: case('gear', **kw)
kvquant = lambda b=3, dim=64, n_calib_tokens=32, **kw: case('kvquant', dim, kvquant_bits=b, n_calib_tokens=n_calib_tokens, **kw)
skvq = lambda b=2, dim=64, w=24, n_calib_tokens=40, **kw: case('skvq', dim, skvq_bits_key=b, skvq_window=w, n_calib_tokens=n_calib_tokens, **kw)
kitty = lambda P=32, **kw: case('kitty', residual_length=P, **kw)
svdq = lambda dim=64, rope=True, **kw: case('svdq', dim, rope=RopeParams(dim) if rope else None, **kw)
palu = lambda dim=64, rope=True, **kw: case('palu', dim, rope=RopeParams(dim) if rope else None, **kw)
spectral = lambda b, **kw: case('spectral', bit_width_inlier=b, **kw)
polar = lambda b, **kw: case('polar', bit_width_inlier=b, **kw)
qjl = lambda m, **kw: case('qjl', jl_dim=m, **kw)
prod = lambda b, **kw: case('turboquant_prod', bit_width_inlier=b, **kw)
vecinfer = lambda kb=6, vb=5, kd=4, vd=4, R=32, N=40, **kw: case('vecinfer', key_codebook_bits=kb, value_codebook_bits=vb, key_sub_dim=kd, value_sub_dim=vd, residual_length=R, n_calib_tokens=N, **kw)
cachegen = lambda b, g=32, **kw: case('cachegen', cachegen_resolved_bits=b, cachegen_group_size=g, **kw)
CODEWORDS = mx.array(np.random.default_rng(0).standard_normal((2, 32, 4)).astype(np.float32)) # of each head
CASES = [
    vecinfer(), vecinfer(8, 8, 8, 8, dim=128, n_rep=4), vecinfer(7, 3, 16, 1, R=0, value_dim=80, B=2), vecinfer(9, 6, 2, 16, dim=32, value_dim=240, R=20), vecinfer(10, 4, 1, 2, dim=256, value_dim=24), vecinfer(5, 5, value_codebook=CODEWORDS, smooth_factors=mx.ones((2,64))*2, key_codebook=CODEWORDS[0], B=2, n_rep=1),
    case('xquant', residual_length=32), case('xquant', dim=80, value_dim=48, B=2, n_rep=4, residual_length=48, xquant_group_quant_size=16, xquant_base_bits=1, xquant_max_ctx=96),
    cachegen(4), cachegen(3, 16, dim=80, value_dim=128, n_rep=4), cachegen(8, 48, B=2, value_dim=72), cachegen(2, 128, dim=128), cachegen(5, dim=96, cachegen_use_delta=False), cachegen(6, 64, dim=256, value_dim=24), cachegen(7, 10, dim=64, value_dim=88, cachegen_use_delta=False),
    svdq(), svdq(128, n_rep=4, svdq_group_size=64, svdq_energy_threshold=0.), svdq(rope=False, B=2, value_dim=80, svdq_rank=40), svdq(80, svdq_bit_schedule=(8,6,5,3,2), svdq_group_size=16), svdq(256, n_rep=1, svdq_bit_schedule=(8,8,0), value_dim=64), svdq(96, rope=False, svdq_bit_schedule=(1,), n_calib_tokens=200),
    palu(), palu(rope=False, palu_n_head_groups=1, palu_rank=24, palu_group_size=8, n_rep=3), palu(128, palu_energy_threshold=.6, B=2), palu(80, value_dim=64, palu_quantize_values=False), palu(96, rope=False, palu_hi_bit=3, palu_lo_bit=3, palu_group_size=16), palu(32, palu_hi_bit=8, palu_hi_fraction=.5, palu_n_head_groups=1, palu_quantize_values=False, value_dim=48),
    qjl(None), qjl(256, dim=128, n_rep=4, bit_width_inlier=3), qjl(88, dim=80, value_dim=64, B=2), qjl(72, dim=72, value_dim=128), qjl(160, value_dim=80, bit_width_inlier=4),
    prod(2), prod(1, dim=128, B=2), prod(3, n_rep=4, value_dim=128), prod(4, dim=80), prod(5, dim=72, value_dim=64), prod(8, dim=128, value_dim=256), prod(6, dim=96),
    case('turboquant_mse'), case('turboquant_mse', bit_width_inlier=3, dim=80, value_dim=128, n_rep=4),
    spectral(2), spectral(3, dim=128, n_rep=4, bit_width_outlier=5), spectral(8, dim=80, value_dim=16, B=2), spectral(1, dim=256, value_dim=24, jl_dim=7), spectral(4, dim=96, value_dim=256, spectral_apply_qjl=False),
    polar(2), polar(1, dim=80, value_dim=16), polar(3, dim=128, n_rep=4), polar(4, dim=256, value_dim=240), polar(6, dim=96, value_dim=48, B=2), polar(5, dim=32, value_dim=176),
    kivi(2, value_dim=80), kivi(4, g=16, R=48, dim=80, n_rep=4), kivi(3, g=48, R=48, B=2), kivi(8, dim=96, value_dim=64),
    kivi_sink(), kivi_sink(3, g=16, R=48, dim=80, n_rep=4, B=2, n_sink_tokens=17), kivi_sink(4, dim=96, value_dim=64, n_sink_tokens=1), kivi_sink(n_sink_tokens=0),
    adakv(), adakv(64, dim=128, n_rep=4, value_dim=80, adakv_importance='attention_entropy'), adakv(48, dim=80, adakv_group_size=16, B=2, adakv_lo_bit=1, adakv_mid_bit=5, adakv_hi_bit=8, adakv_target_avg_bits=3.5, adakv_update_interval=2),
    adakv(dim=256, value_dim=64, adakv_mid_bit=2, adakv_target_avg_bits=3.3), adakv(adakv_lo_bit=3, adakv_hi_bit=3, adakv_target_avg_bits=3.),
    rvq(2), rvq(1, B=2), rvq(3, n_rep=4, value_dim=128), rvq(5, dim=128), rvq(8, dim=80), rvq(4, dim=256, value_dim=64),
    gear(), gear(gear_rank=0, B=2), gear(gear_sparse_fraction=0., gear_rank=3, value_dim=80), gear(gear_bits=4, gear_rank=16, n_rep=4, dim=96), gear(gear_quantize_values=False),
    gear(gear_rank=0, gear_sparse_fraction=0., gear_group_size=48),
    kvquant(rope=RopeParams(64)), kvquant(B=2, value_dim=80), kvquant(2, kvquant_outlier_fraction=0., kvquant_n_sink=0, rope=RopeParams(64, base=5e5, scale=.25)),
    kvquant(5, dim=80, n_rep=4, rope=RopeParams(80), kvquant_n_sink=5),
    skvq(rope=RopeParams(64)), skvq(3, B=2, value_dim=80, skvq_group_size=24), skvq(4, dim=80, n_rep=4, rope=RopeParams(80, base=5e5, scale=.25), skvq_n_sink=0, skvq_bits_value=8),
    skvq(dim=128, skvq_clip_search=False, skvq_group_size=8, skvq_bits_value=1), skvq(dim=72, skvq_reorder=False, w=0),
    kitty(), kitty(64, dim=128, n_rep=4, value_dim=80), kitty(48, dim=80, kitty_group_size=16, kitty_hi_fraction=.5, B=2), kitty(dim=256, value_dim=64),
    kitty(dim=128, kitty_hi_fraction=1.), kitty(kitty_hi_fraction=0.), *(kitty(dim=d, kitty_lo_bit=a, kitty_hi_bit=b) for a,b,d in ((2,3,72), (2,5,128), (4,8,96), (3,8,64), (2,8,80), (1,8,64)))]
ONE = list({c.method: c for c in reversed(CASES)}.values())[::-1] # the first of each method
one = pytest.mark.parametrize('case', ONE, ids=str)

def draw(case, n, seed, dtype=mx.float16, H=2):
    "q, k, v of n tokens; some channels are large, some numbers stand out"
    rng = np.random.default_rng(seed)
    shape = lambda h, d: (case.B, h, n, d)
    q, k, v = (rng.standard_normal(shape(h, d)) for h,d in ((H*case.n_rep, case.dim), (H, case.dim), (H, case.value_dim)))
    k += np.random.default_rng(5).standard_normal((1, H, 1, case.dim))
    v *= np.exp(rng.standard_normal((*v.shape[:-1], 1))/2)
    for x in (k, v): x[rng.random(x.shape)<.003] *= 6
    return [mx.array(x.astype(np.float32)).astype(dtype) for x in (q, k, v)]

def call(c, x, mask='made', sinks=None):
    q, k, v = x
    handles = c.update_and_fetch(k, v)
    if isinstance(mask, str): mask = 'causal' if q.shape[2]>1 else None
    return mx.fast.scaled_dot_product_attention(q, *handles, scale=q.shape[-1]**-.5, mask=mask, sinks=sinks)

def assert_same_storage(a, b, close):
    "Codes, scales, tables and exact rows bit for bit, or nearly all of the numbers that are read"
    assert a.counts()==b.counts()
    assert [(x.shape, x.dtype) for x in a.payload()]==[(x.shape, x.dtype) for x in b.payload()]
    if not close:
        for x,y in zip(a.payload(), b.payload()): assert mx.array_equal(x, y, equal_nan=True).item()
        return
    for s,t in ((a.keys_stream, b.keys_stream), (a.values_stream, b.values_stream)):
        x, y = (np.array(o.read(o.first, a.offset)) for o in (s, t))
        assert (np.abs(x-y)<=2e-3*np.abs(y)).mean()>.999

class Pair:
    "A cache with kernels and one without, fed alike"
    def __init__(self, case, layout='cuda', **kw):
        self.case, self.backend = case, emulated(layout)
        with use_backend(self.backend): self.fused = case.cache(**kw)
        self.plain = case.cache(use_metal_kernels=False, **kw)
    def __call__(self, x, mask='made', sinks=None):
        "One call; the same codes are read, those that the kernels wrote"
        with use_backend(self.backend):
            got = call(self.fused, x, mask, sinks)
            mx.eval(got)
        assert self.fused.no_kernel is None
        q, k, v = x
        learns = self.plain.needs_queries
        handles = self.plain.update_and_fetch(k, v)
        if not learns: assert_same_storage(self.fused, self.plain, self.case.close)
        if self.case.close: self.plain.restore([mx.array(o) for o in self.fused.payload()], self.fused.counts())
        if isinstance(mask, str): mask = 'causal' if q.shape[2]>1 else None
        want = mx.fast.scaled_dot_product_attention(q, *handles, scale=q.shape[-1]**-.5, mask=mask, sinks=sinks)
        if learns: # what is packed depends on the queries too, and is packed when the state is asked for
            with use_backend(self.backend): mx.eval(want, self.fused.state, self.plain.state)
            assert_same_storage(self.fused, self.plain, self.case.close)
        assert got.dtype==want.dtype and got.shape==want.shape
        bound = 8e-3 if q.dtype==mx.bfloat16 else 3e-3 if self.case.rope else 2e-3 # the output has 8 bits; angles are products of halves
        assert distance(got, want)<bound and error(got, want)<3*bound
    def trim(self, n):
        with use_backend(self.backend): assert self.fused.trim(n)==n
        self.plain.trim(n)

# --- outputs and codes

def test_methods_with_kernels():
    found = set()
    with use_backend(emulated()):
        for name in methods():
            if not issubclass(serving(name), QuantizedCache): continue
            c = next((c for c in CASES if c.method==name), case(name))
            cache = c.cache()
            call(cache, draw(c, 3, 0))
            if cache.no_kernel is None: found.add(name)
    assert found>=MUST
    assert {c.method for c in CASES}>=found, 'add the others to CASES'

@pytest.mark.parametrize('case,layout', [(c, l) for i,c in enumerate(CASES) for l in (('cuda', 'metal') if c in ONE else (('cuda', 'metal')[i%2],))], ids=str)
def test_same_outputs(case, layout):
    "A prompt, chunks, steps, calls of a few tokens, and what is left after `trim`"
    p = Pair(case, layout)
    for i,n in enumerate([133, 37, 81, 1, 4, 1, 1]): p(draw(case, n, i))
    p.trim(5)
    p(draw(case, 1, 10))
    p.trim(31)
    for i,n in enumerate([1, 3, 1]): p(draw(case, n, 20+i))
    if case not in ONE: return
    p.trim(p.fused.offset-7)
    for i,n in enumerate([1, 2]): p(draw(case, n, 30+i))

@pytest.mark.parametrize('fields', [{}, dict(spectral_key_d_eff=0, spectral_val_d_eff=16, jl_dim=5, bit_width_outlier=3), dict(spectral_apply_qjl=False, spectral_key_d_eff=64)], ids=str)
def test_bases_of_heads(fields):
    "Spectral: each head has axes and widths of its own"
    from veloxquant_mlx.methods.spectral import Basis, Calibration, haar_rotation
    falls = [np.arange(1, 65)**-p for p in (3., .7)]
    basis = lambda seed: Basis(mx.stack([haar_rotation(64, seed+i) for i in (0, 1)]), np.stack(falls))
    p = Pair(spectral(2, **fields))
    p.fused.calibration = p.plain.calibration = Calibration(basis(0), basis(2))
    for i,n in enumerate([133, 1, 4]): p(draw(p.case, n, i))
    assert not (p.fused.keys_stream.codec.plan.widths[0]==p.fused.keys_stream.codec.plan.widths[1]).all()

@one
@pytest.mark.parametrize('dtype', [mx.float32, mx.bfloat16])
def test_dtypes(case, dtype):
    p = Pair(case)
    for i,n in enumerate([140, 1]): p(draw(case, n, i, dtype))

@one
def test_without_fused_sdpa(case):
    "The default: kernels read single tokens, array operations read calls of several, from the same codes"
    p = Pair(case, fused_sdpa=False)
    for i,n in enumerate([140, 1, 5, 1]): p(draw(case, n, i))

@pytest.mark.parametrize('case,layout', list(zip(ONE, ['cuda', 'metal']*len(ONE))), ids=str)
def test_sliding_window(case, layout):
    "Buffers are cut at the front in the course of it"
    p = Pair(case, layout, sliding_window=24)
    for i,n in enumerate([260, 41, 1, 30, 1, 1, 4, 1]): p(draw(case, n, i))
    assert p.fused.keys_stream.dropped and p.fused.values_stream.dropped

@one
def test_masks_and_sinks(case):
    "Two sequences of one batch, the first with left padding"
    c = Case(**vars(case)|dict(B=2))
    p = Pair(c, layout='metal')
    sinks = mx.array([2., -1, 0, 1])
    for i,n in enumerate([140, 1, 4, 70]):
        T = p.fused.offset+n
        visible = (mx.arange(T)>=mx.array([9, 0])[:, None])[:, None, None]
        if n>1: visible = visible & (mx.arange(T)<=mx.arange(T-n, T)[:, None])
        p(draw(c, n, i), mx.where(visible, mx.array(.5*np.cos(np.arange(T))).astype(mx.float16), -mx.inf) if i==2 else visible, sinks if i else None)

@one
def test_state(case):
    "Saved, restored and copied caches go on in the same way"
    x = [draw(case, n, i) for i,n in enumerate([141, 1, 3, 1])]
    with use_backend(emulated()):
        a = case.cache()
        for y in x[:2]: call(a, y)
        b, c = type(a).from_state([mx.array(o) for o in a.state]), copy.deepcopy(a)
        for y in x[2:]:
            outs = [call(o, y) for o in (a, b, c)]
            assert all((o==outs[0]).all().item() for o in outs[1:])
        assert b.no_kernel is None and b.details()==a.details()

@one
def test_chunks_do_not_matter(case):
    "What is stored does not depend on how the tokens came"
    x = draw(case, 150, 0)
    with use_backend(emulated()):
        whole, parts = case.cache(), case.cache()
        for c in (whole, parts): c.expect_prompt(150) # for methods that pack at its end
        call(whole, x)
        at = 0
        for n in [1, 1, 40, 100, 1, 7]:
            y = [o[:, :, at:at+n] for o in x]
            if parts.needs_queries or methods()[case.method].family=='low_rank': call(parts, y) # others act without attention
            else: parts.update_and_fetch(*y[1:])
            at += n
        mx.eval(whole.state, parts.state)
        assert_same_storage(whole, parts, False)

@one
def test_launches_of_a_step(case):
    "The two attention kernels once, and at most one that encodes for each side; signs of a residual need its codes first"
    inner, names = emulated(), []
    def launch(kernel, *args):
        names.append(kernel.name)
        return inner.launch(kernel, *args)
    with use_backend(Backend('counting', launch)):
        c = case.cache()
        call(c, draw(case, 140, 0))
        mx.eval(c.state) # what the prompt's queries decided is packed now, not with the step
        names.clear()
        mx.eval(call(c, draw(case, 1, 1)))
    assert names.count('decode_attention')==1 and names.count('merge_splits')<=1 and len(names)<=4+(case.method=='turboquant_prod')

# --- whether kernels run, and what is said about it

def refuse(kernel, *args): raise AssertionError(f'{kernel.name} was launched')
REFUSING = Backend('refusing', refuse)

@one
def test_switched_off(case):
    "False: nothing is launched"
    with use_backend(REFUSING):
        c = case.cache(use_metal_kernels=False)
        for i,n in enumerate([140, 1, 4]): mx.eval(call(c, draw(case, n, i)))
        c.trim(3)
        assert c.no_kernel=='kernels are off' and 'kernels' not in c.details().replace('use_metal_kernels', '')
        with pytest.raises(AssertionError, match='was launched'):
            c = case.cache()
            for i,n in enumerate([140, 1]): call(c, draw(case, n, i))

@one
def test_details(case):
    with use_backend(emulated()):
        assert case.cache().details().endswith(', kernels')
        dim = no_lanes(case.method)[0]
        assert case.rope or case.cache(head_dim=dim).details().endswith(f'array operations: head dimension {dim} is not a multiple of 8 up to 256')
    with use_backend(None): assert 'kernels' not in case.cache().details()

@one
def test_required(case):
    "True: an error says why they cannot run"
    plain = Case(**vars(case)|dict(rope=None))
    with use_backend(emulated()):
        c = case.cache(use_metal_kernels=True)
        for i,n in enumerate([140, 1]): call(c, draw(case, n, i))
        assert c.no_kernel is None
        for dim in no_lanes(case.method):
            with pytest.raises(RuntimeError, match=f'{case.method} has no GPU kernel here: head dimension {dim} is not'): plain.cache(use_metal_kernels=True, head_dim=dim)
    with use_backend(None), pytest.raises(RuntimeError, match=f'there are no GPU kernels for {case.method} on this device'): plain.cache(use_metal_kernels=True)

@one
def test_required_after_the_first_rows(case):
    "Values may have another dimension; a refusal changes nothing"
    (q, k, v), dim = draw(case, 3, 0), no_lanes(case.method)[0]
    with use_backend(emulated()):
        c = case.cache(use_metal_kernels=True)
        with pytest.raises(RuntimeError, match=f'head dimension {dim} is not'): call(c, (q, k, mx.zeros((*k.shape[:3], dim), k.dtype)))
        assert c.offset==0 and c.keys_stream is None
        call(c, (q, k, v))

UNFIT = [(case('kvtc'), 'codes of several widths and their scales lie in one row of bits'), (svdq(rope=False, svdq_group_size=8), 'groups of 8 tokens are no multiple of 16'), (svdq(rope=False, svdq_group_size=0), 'a prompt that is one group ends within a tile of tokens'), (svdq(72, rope=False), 'head dimension 72 is not a multiple of 16'),
    (cachegen(4, 10), 'groups of 10 tokens are no multiple of 16'), (qjl(32), '32 signs are fewer than the 64 channels of exact rows'), (qjl(100), '100 signs are not a multiple of 8 up to 256'),
    (qjl(64, n_outlier_channels=4, n_calib_tokens=8), 'every group of tokens has outlier channels of its own'), (prod(2, jl_dim=32), '32 signs of 64 channels cannot be read beside the codes'), (prod(2, dim=256), 'keys of 512 numbers are more than 256'), (polar(6, dim=256), '8 angles of 6 bits are more than a word'), (kivi(2, g=8), 'groups of 8 tokens are no multiple of 16'), (gear(gear_group_size=24), 'groups of 24 tokens are no multiple of 16|groups of 24 are no multiple of 16'),
    (gear(gear_rank=17), 'rank 17 is more than 16'), (kvquant(kvquant_refit_interval=64), 'tables differ from epoch to epoch'),
    (kitty(24, kitty_group_size=24), 'groups of 24 tokens are no multiple of 16'), (kitty(dim=256, kitty_hi_fraction=.6), '10 words of upper bits a token are more than 8'),
    (spectral(2, jl_dim=9), '9 rows of a sketch are more than 8'), (spectral(8, dim=256, spectral_apply_qjl=False), 'codes of a lane lie in 8 words, more than 5'),
    (skvq(dim=136), 'head dimension 136 is above 128'), (case('age_tiered'), 'codes of three widths lie in three pools'),
    (adakv(24, adakv_group_size=8), 'groups of 8 tokens are no multiple of 16|blocks of 24 tokens are no multiple of 16'),
    (rvq(2, enable_outlier_two_stream=True, n_outlier_channels=8, n_calib_tokens=32), 'its codec has no kernel snippet')]

@pytest.mark.parametrize('case,reason', UNFIT, ids=str)
def test_unfit_options(case, reason):
    "Array operations take over, unless kernels are required"
    with use_backend(REFUSING):
        c = case.cache()
        for i,n in enumerate([140, 1]): call(c, draw(case, n, i))
        assert c.details().split('array operations: ')[1] in reason.split('|')
        with pytest.raises(RuntimeError, match=f'{case.method} has no GPU kernel here: ({reason})'): case.cache(use_metal_kernels=True)

def test_rope_that_kernels_do_not_know():
    "It is known when the cache meets its model"
    c = kvquant(rope=RopeParams(32))
    with use_backend(REFUSING):
        cache = c.cache()
        for i,n in enumerate([140, 1]): call(cache, draw(c, n, i))
        assert 'RoPE turns other pairs' in cache.no_kernel
        with pytest.raises(RuntimeError, match='RoPE turns other pairs'): call(c.cache(use_metal_kernels=True), draw(c, 3, 0))

# --- segments of classes

zipcache = lambda **kw: case('zipcache', **kw)
amc = lambda **kw: case('amc', **kw)
SEGMENTED = [zipcache(value_dim=80), zipcache(dim=128, B=2, zipcache_hi_bits=8, zipcache_lo_bits=3), zipcache(dim=80, zipcache_quantize_values=False, zipcache_hi_fraction=.01), zipcache(zipcache_hi_fraction=1., n_rep=4),
    amc(), amc(dim=128, value_dim=80, n_rep=4), amc(dim=80, value_dim=96, B=2, amc_group_size=8), amc(dim=256, amc_k_high=0., amc_group_size=20), amc(dim=96, value_dim=8, amc_use_query_saliency=True),
    amc(amc_adaptive_thresholds=True, amc_calib_variance=.01)]

@pytest.mark.parametrize('case,layout', [(c, l) for i,c in enumerate(SEGMENTED) for l in (('cuda', 'metal') if i in (0, 5) else (('cuda', 'metal')[i%2],))], ids=str)
def test_segments(case, layout):
    "Steps behind a prompt, with a second segment, calls of a few tokens, a cut segment and a restored cache: as with array operations, and the same is stored"
    sinks = mx.array([2., -1, 0, 1]*case.n_rep)[:2*case.n_rep].astype(mx.float16)
    inner, names = emulated(layout), []
    def launch(kernel, *args):
        names.append(kernel.name)
        return inner.launch(kernel, *args)
    back = Backend('counting', launch)
    with use_backend(back): a = case.cache()
    b = case.cache(use_metal_kernels=False)
    def step(n, seed, kernels=True):
        names.clear()
        x, outs = draw(case, n, seed), []
        with use_backend(back if kernels else None):
            for c in (a, b):
                outs.append(call(c, x, sinks=sinks))
                mx.eval(outs[-1])
            if not kernels: return
            assert bool(names)==([sum(o) for o in a.sizes]==a.lengths)
        assert distance(*outs)<2e-3 and error(*outs)<6e-3
    for c in (a, b): c.expect_prompt(140)
    step(140, 0, kernels=False)
    assert a.no_kernel is None and a.details().endswith('kernels')
    step(1, 1)
    a.kernels = False # most of a second segment
    for i in range(126): step(1, 10+i, kernels=False)
    a.kernels = True
    for i,n in enumerate([1, 1, 4, 1]): step(n, 200+i)
    assert len(a.begins)>=2 and all(mx.array_equal(x, y) for x,y in zip(a.payload(), b.payload(), strict=True))
    with use_backend(back): a, b = (type(a).from_state([mx.array(o) for o in c.state]) for c in (a, b))
    b.kernels = False
    for i,n in enumerate([0, 1, 6]): # of exact tokens, and of the last segment
        for c in (a, b): assert c.trim(n)==n
        for j in range(2): step(1, 300+10*i+j)

def test_segments_are_counted():
    "zipcache has a part for each segment; of many, array operations read all"
    with use_backend(emulated()):
        c = zipcache().cache(zipcache_group_size=8)
        c.begins = list(range(17))
        assert c.details().endswith('array operations: more than 16 segments')
        for method in (zipcache, amc):
            assert method().cache(head_dim=84).details().endswith('array operations: head dimension 84 is not a multiple of 8 up to 256')
            assert method().cache(use_metal_kernels=True).no_kernel is None
            with pytest.raises(RuntimeError, match='has no GPU kernel here: head dimension 84'): method().cache(use_metal_kernels=True, head_dim=84)
    with use_backend(REFUSING):
        for method in (zipcache, amc):
            c = method().cache(use_metal_kernels=False)
            c.expect_prompt(140)
            for i,n in enumerate([140, 1]): mx.eval(call(c, draw(method(), n, i)))

# --- tests of the test

SIMD = 'simdgroup_barrier(mem_flags::mem_threadgroup);'

@pytest.mark.parametrize('case,barrier,which', [(rvq(2), BARRIER, 0), (kvquant(), BARRIER, 0), (kvquant(rope=RopeParams(64)), BARRIER, 0),
    *((c, SIMD, i) for c in (kvquant(kvquant_outlier_fraction=.1), gear()) for i in range(6))], ids=str)
def test_missing_barrier(case, barrier, which, monkeypatch):
    "Tables of levels and angles, and the sparse corrections of keys (0-2) and values (3-5)"
    edited(monkeypatch, 'attention', barrier, '', which)
    with_splits(monkeypatch, 1)
    with use_backend(emulated()), pytest.raises(DataRace):
        c = case.cache()
        for i,n in enumerate([140, 1]): call(c, draw(case, n, i))

# --- handles

def test_handles_without_rows():
    "Once the hook answers steps of one token, their handles hold no rows; a model that bypasses the hook always gets them"
    rng = np.random.default_rng(0)
    k, v, q = (mx.array(rng.standard_normal((1, h, 20, 64)).astype(np.float32)) for h in (2, 2, 4))
    def steps(hooked):
        with use_backend(emulated()):
            c = methods()["turboquant_rvq"].cache_class.of(head_dim=64)
            for a,b in ((0, 16), (16, 17), (17, 18), (18, 19)):
                keys, values = c.update_and_fetch(k[:, :, a:b], v[:, :, a:b])
                if hooked: mx.eval(mx.fast.scaled_dot_product_attention(q[:, :, a:b], keys, values, scale=.125))
            return keys*1, c.dense('k', 19)
    for hooked in (False, True):
        rows, dense = steps(hooked)
        assert rows.shape==dense.shape==(1, 2, 19, 64)
        assert mx.isnan(rows).all() if hooked else mx.array_equal(rows, dense)
