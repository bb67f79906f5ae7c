"Every servable method in a few small configurations, and what the contract tests share: a method is covered by being registered."
import bisect
import functools
from dataclasses import dataclass, fields, replace
import mlx.core as mx
import mlx_lm.models.cache
import numpy as np
import pytest
from veloxquant_mlx.cache.base import KVCacheConfig
from veloxquant_mlx.engine.registry import methods
from veloxquant_mlx.ops.rope import RopeParams

T, H, H_Q, D, SCALE = 290, 2, 4, 32, .2

# --- what differs between methods

@dataclass(frozen=True)
class Traits:
    trimmable:bool = True # `trim(n)` removes n tokens
    evicts:bool = False # keeps some rows and forgets the others
    reads_rows:bool = True # a call of several tokens reads stored rows as they lie
    prompt_end:bool = False # acts when a prompt ends: where it ends is announced, and its calls are read exactly
    exact_prompt:bool = True # a prompt fed in one call gets exact attention
    below_fp16:bool = True # fewer bytes than fp16 at 2,048 tokens, whatever the rows
    most_bytes:float = .6 # and at most this part of them
    exact_values:bool = False # values stay as they are
    uneven_heads:bool = False # what a head needs depends on its rows, and arrays are as wide as the widest
    ranks_nan:bool = False # NaN is an input with a meaning
    draws_rows:bool = False # lots differ from row to row of a batch, and so do values from those of a row alone
    averages_heads:bool = True # each query head twice, beside itself, is the same as once
    sides:str = 'kv' # what the width is a width of
    powers_of_two:str = '' # sides ('k', 'v') whose head dimension must be one
    worst:float = .6 # relative error of the narrowest width, at most
    seed:str|None = None # the field that random draws come from

FAMILY = dict(quantize={}, hybrid={}, low_rank=dict(prompt_end=True), cross_layer=dict(prompt_end=True),
    evict=dict(trimmable=False, evicts=True, prompt_end=True))
METHOD = dict(
    turboquant_rvq=dict(seed='seed'), turboquant_mse=dict(seed='seed'), turboquant_prod=dict(seed='seed'), polar=dict(seed='seed'), qjl=dict(seed='seed', sides='v'), spectral=dict(seed='seed'), vecinfer=dict(seed='seed', powers_of_two='k'), nsnquant=dict(seed='nsn_seed', powers_of_two='kv'), gear=dict(seed='seed'),
    zipcache=dict(prompt_end=True, seed='seed'), amc=dict(prompt_end=True), anchorkv=dict(prompt_end=True, seed='anchorkv_seed'),
    xquant=dict(prompt_end=False), cachegen=dict(worst=1.), kvtc=dict(prompt_end=False, worst=.8), svdq=dict(exact_values=True, uneven_heads=True), palu=dict(exact_prompt=False, uneven_heads=True), minicache=dict(below_fp16=False), a2ats=dict(trimmable=False, below_fp16=False, seed='seed'),
    rocketkv=dict(trimmable=False, evicts=True, prompt_end=True, most_bytes=.7), streaming_llm=dict(prompt_end=False, exact_prompt=False, reads_rows=False),
    kvzip=dict(below_fp16=False), chunkkv=dict(uneven_heads=True), cam=dict(seed='seed', draws_rows=True), curdkv=dict(seed='seed', ranks_nan=True), keyformer=dict(seed='keyformer_seed', averages_heads=False), morphkv=dict(averages_heads=False), knorm=dict(ranks_nan=True))

SERVABLE = {k: replace(m, cache_class=m.cache_class.serving) if m.standalone else m for k,m in methods().items()} # standalone ones by their serving class
def traits(method): return Traits(**FAMILY[SERVABLE[method].family] | METHOD.get(method, {}))

# --- configurations

SMALL = dict( # fields with which a method begins to pack after a few dozen tokens; the defaults of the others do by token 290
    squeeze=dict(squeeze_budget=64),
    cam=dict(cam_budget=64),
    keyformer=dict(keyformer_budget=64, keyformer_recent=16), morphkv=dict(morphkv_budget=64),
    rocketkv=dict(rocketkv_compression_ratio=32., rocketkv_obs_window=8),
    nestedkv=dict(nestedkv_budget=64), curdkv=dict(curdkv_budget=64),
    qfilters=dict(qfilters_budget=64, qfilters_calib_tokens=50, qfilters_min_retention=None),
    kvzip=dict(kvzip_budget=64, kvzip_probe='latest'),
    knorm=dict(knorm_budget=64), kvtc=dict(calibrated='head'),
    anchorkv=dict(anchorkv_window=8, anchorkv_anchor_frac=.125, anchorkv_theta=.3),
    tova=dict(tova_budget=64),
    pyramidkv=dict(pyramid_budget=64),
    chunkkv=dict(chunkkv_budget=100, chunkkv_chunk_size=4),
    h2o=dict(h2o_budget=64, h2o_grace=8),
    snapkv=dict(snap_budget=64, snap_obs_window=8),
    streaming_llm=dict(stream_window_size=60),
    kivi=dict(residual_length=32, kivi_group_size=8), kivi_sink=dict(residual_length=32, kivi_group_size=8, n_sink_tokens=2), adakv=dict(residual_length=32, adakv_group_size=8),
    age_tiered=dict(age_recent_boundary=32, age_mid_boundary=96, age_group_size=16),
    skvq=dict(n_calib_tokens=32, skvq_window=16, skvq_group_size=16),
    nsnquant=dict(nsn_residual_length=16, nsn_max_ctx=10**6),
    vecinfer=dict(residual_length=16, n_calib_tokens=32, key_codebook_bits=6, value_codebook_bits=5),
    svdq=dict(svdq_group_size=64), xkv=dict(xkv_energy_threshold=1.),
    a2ats=dict(a2ats_window=16, a2ats_codebook_bits=5),
    xquant=dict(residual_length=32, xquant_group_quant_size=16),
    kvquant=dict(n_calib_tokens=32, kvquant_group_size=8), kitty=dict(residual_length=32, kitty_group_size=8))
BOOK = mx.array(np.random.default_rng(4).standard_normal((32,8)).astype(np.float32))
VARIANTS = dict(
    morphkv=dict(paper=dict(morphkv_budget=57, morphkv_n_sink=0, morphkv_window=30), one=dict(morphkv_budget=41, morphkv_window=1)),
    cam=dict(paper=dict(cam_budget=41, cam_n_sink=0, cam_merge='mean'), keys=dict(rope=RopeParams(24), cam_budget=37, cam_merge_keys=True, cam_merge_gate=False), window=dict(cam_merge='drop')),
    squeeze=dict(window=dict(squeeze_budget=41, squeeze_n_sink=0), own=dict(squeeze_resolved_budget=37)),
    keyformer=dict(paper=dict(keyformer_budget=41, keyformer_n_sink=0, keyformer_recent=12, keyformer_tau_end=2., keyformer_anneal_steps=5), flat=dict(keyformer_budget=37, keyformer_recent=0, keyformer_tau=3.)),
    rocketkv=dict(few=dict(rocketkv_compression_ratio=8., rocketkv_page_size=5, rocketkv_head_topk1=3, rocketkv_n_sink=0), exact=dict(rocketkv_page_size=1, rocketkv_head_topk1=16, rocketkv_obs_window=1)),
    nestedkv=dict(free=dict(nestedkv_budget=41, nestedkv_n_sink=0, nestedkv_window=5, nestedkv_safeguard_alpha=0.), even=dict(nestedkv_safeguard_alpha=1., nestedkv_beta=0.)),
    curdkv=dict(exact=dict(curdkv_budget=45, curdkv_n_sink=0, curdkv_rank_cap=256), one=dict(curdkv_budget=37, curdkv_n_sink=30, curdkv_rank_cap=1)),
    qfilters=dict(recent=dict(qfilters_budget=45, qfilters_n_sink=0, qfilters_recent=21, qfilters_min_retention=.9), one_query=dict(qfilters_budget=37, qfilters_calib_tokens=1, qfilters_sign=-1)),
    streaming_llm=dict(rope=dict(rope=RopeParams(24), stream_window_size=40), window=dict(stream_n_sink=0, stream_window_size=50)),
    snapkv=dict(half=dict(snap_dtype='float16', snap_obs_window=16), per_head=dict(snap_batched_scoring=False, snap_n_sink=0, snap_budget=50)),
    kvzip=dict(no_sinks=dict(kvzip_budget=45, kvzip_n_sink=0)),
    knorm=dict(recent=dict(knorm_budget=45, knorm_n_sink=0, knorm_recent=21), longest=dict(knorm_budget=37, knorm_keep='high')),
    tova=dict(paper=dict(tova_budget=41, tova_n_sink=0), plain=dict(tova_backend="mlx"), words=dict(tova_budget=30, tova_backend="reference")),
    pyramidkv=dict(paper=dict(pyramid_budget=41, pyramid_n_sink=0, pyramid_beta=20., pyramid_backend="mlx"), own=dict(pyramid_resolved_budget=40)),
    chunkkv=dict(paper=dict(chunkkv_budget=232, chunkkv_n_sink=0, chunkkv_chunk_size=10), norms=dict(chunkkv_score="key_norm")),
    h2o=dict(paper=dict(h2o_budget=41, h2o_n_sink=0, h2o_grace=0, h2o_decay=1.), window=dict(h2o_budget=30, h2o_grace=30)),
    spectral=dict(uneven=dict(bit_width_outlier=5, jl_dim=7, spectral_key_d_eff=9, spectral_val_d_eff=16), no_sketch=dict(spectral_apply_qjl=False, spectral_key_d_eff=0)),
    amc=dict(query=dict(amc_use_query_saliency=True), adaptive=dict(amc_adaptive_thresholds=True, amc_calib_variance=.01, amc_threshold_window=32), all_mid=dict(amc_k_high=0., amc_k_mid=1., amc_group_size=8)),
    zipcache=dict(wide=dict(zipcache_hi_bits=8, zipcache_lo_bits=3, zipcache_hi_fraction=.5), exact_values=dict(zipcache_quantize_values=False)),
    anchorkv=dict(rope=dict(rope=RopeParams(24)), all_rests=dict(anchorkv_theta=1., anchorkv_residual_bits=4, anchorkv_rho=1.), no_rests=dict(anchorkv_theta=.05)),
    age_tiered=dict(uneven=dict(age_recent_boundary=21, age_mid_boundary=50, age_bits_recent=7, age_bits_mid=5, age_bits_old=3), one_tier=dict(age_recent_boundary=0, age_mid_boundary=0)),
    turboquant_prod=dict(outliers=dict(enable_outlier_two_stream=True, n_outlier_channels=8, bit_width_outlier=8, n_calib_tokens=32), signs=dict(bit_width_inlier=1, jl_dim=80)),
    qjl=dict(outliers=dict(n_outlier_channels=4, n_calib_tokens=4, jl_dim=48, bit_width_outlier=2), short=dict(jl_dim=20)),
    turboquant_mse=dict(outliers=dict(enable_outlier_two_stream=True, n_outlier_channels=8, bit_width_outlier=8, n_calib_tokens=32)),
    turboquant_rvq=dict(outliers=dict(enable_outlier_two_stream=True, n_outlier_channels=8, bit_width_outlier=8, n_calib_tokens=32)),
    kvquant=dict(rope=dict(rope=RopeParams(24)), epochs=dict(kvquant_refit_interval=48, kvquant_n_sink=4), plain=dict(kvquant_outlier_fraction=0., kvquant_n_sink=0)),
    adakv=dict(entropy=dict(adakv_importance='attention_entropy', adakv_obs_window=8), uneven=dict(adakv_lo_bit=1, adakv_mid_bit=4, adakv_hi_bit=8, adakv_target_avg_bits=4.3, adakv_update_interval=2)),
    palu=dict(rope=dict(rope=RopeParams(32)), one_group=dict(palu_n_head_groups=1, palu_rank=17, palu_group_size=8), exact_latents=dict(palu_quantize_values=False, palu_energy_threshold=.5)),
    xkv=dict(rope=dict(rope=RopeParams(32)), half_latents=dict(xkv_latent_bits=16, xkv_rank=20), few=dict(xkv_rank=40, xkv_latent_bits=3, xkv_group_quant_size=8)),
    svdq=dict(rope=dict(rope=RopeParams(32)), whole=dict(svdq_group_size=0, svdq_bit_schedule=(5,3,1), svdq_rank=27), first=dict(n_calib_tokens=128, svdq_energy_threshold=.6)),
    kivi_sink=dict(many=dict(n_sink_tokens=30, bit_width_inlier=3), none=dict(n_sink_tokens=0)),
    nsnquant=dict(rope=dict(rope=RopeParams(24)), one_bit=dict(nsn_bits=1, nsn_subvector_dim=16, nsn_codebook_size=16, nsn_residual_length=12), uneven=dict(nsn_subvector_dim=4, nsn_codebook_size=5, nsn_residual_length=24)),
    vecinfer=dict(uneven=dict(residual_length=12, n_calib_tokens=50, key_sub_dim=2, key_codebook_bits=5, value_sub_dim=16, value_codebook_bits=9), at_once=dict(residual_length=0)),
    skvq=dict(rope=dict(rope=RopeParams(24)), uneven=dict(skvq_bits_key=3, skvq_bits_value=5, skvq_group_size=24), plain=dict(skvq_reorder=False, skvq_clip_search=False, skvq_clip_alpha=.9, skvq_n_sink=0, skvq_window=0)),
    a2ats=dict(rope=dict(rope=RopeParams(24)), given=dict(a2ats_codebook=BOOK, a2ats_query_h=mx.diag(mx.arange(1., 9.))), few=dict(a2ats_use_query_aware=False, a2ats_retrieval_fraction=.03, a2ats_sub_dim=4, a2ats_codebook_bits=3)),
    cachegen=dict(eights=dict(cachegen_group_size=8, cachegen_resolved_bits=5), direct=dict(cachegen_use_delta=False, cachegen_group_size=16)),
    kvtc=dict(layer=dict(calibrated='layer', kvtc_bit_budget=96, rope=RopeParams(24)), prompt=dict(calibrated=None, kvtc_bit_budget=128, kvtc_bit_choices=(0,3,5))),
    gear=dict(rank2=dict(gear_rank=2, gear_sparse_fraction=0.), exact_values=dict(gear_quantize_values=False, gear_rank=0)),
    xquant=dict(one_bit=dict(xquant_base_bits=1, residual_length=48, xquant_max_ctx=96)),
    kitty=dict(wide=dict(kitty_lo_bit=3, kitty_hi_bit=8, kitty_hi_fraction=.4), plain=dict(kitty_hi_fraction=0.)))
VARIANT_TRAITS = dict(cam=dict(keys=dict(seed=None, draws_rows=False), window=dict(seed=None, draws_rows=False)), xkv=dict(half_latents=dict(below_fp16=False)), curdkv=dict(exact=dict(seed=None)), a2ats=dict(given=dict(trimmable=True, seed=None)), kvtc=dict(prompt=dict(prompt_end=True, uneven_heads=True))) # what differs from the method's own
EXACT = dict(nestedkv=64, cam=64, morphkv=64, squeeze=64, kvzip=64, rocketkv=13, keyformer=64, chunkkv=100, curdkv=64, pyramidkv=64, qfilters=64, streaming_llm=64, tova=64, snapkv=64, knorm=64, h2o=64, vecinfer=31, a2ats=55, nsnquant=15, spectral=0, polar=0, turboquant_rvq=0, turboquant_mse=0, turboquant_prod=0, qjl=0, kivi=31, kivi_sink=31, xquant=31, cachegen=31, kvtc=131, adakv=31, kvquant=32, gear=127, skvq=36) # tokens that `SMALL` keeps exact

APART = 'rope', 'calibrated' # what a case has beside fields

@dataclass(frozen=True)
class Case:
    method:str
    name:str # of the configuration: a width or a variant
    given:tuple # (field, value) pairs
    def __str__(self): return f'{self.method}-{self.name}'
    @property
    def traits(self): return replace(traits(self.method), **VARIANT_TRAITS.get(self.method, {}).get(self.name, {}))
    @property
    def window_unit(self): # a sliding window must be a multiple of it
        d = dict(self.given)
        return 4*d['n_calib_tokens'] if self.method=='qjl' and d.get('n_outlier_channels') else 1
    def config(self, head_dim=32, **kw):
        "Fields of the method go through its options object"
        m, kw = SERVABLE[self.method], {k: v for k,v in self.given if k not in APART}|kw
        own = {f.name: kw.pop(f.name) for f in fields(m.options) if f.name in kw}
        return KVCacheConfig(method=self.method, head_dim=head_dim, options=m.options(**own), **kw)
    def create(self, **kw):
        c = CALIBRATED.get((self.method, dict(self.given).get('calibrated')), SERVABLE[self.method].cache_class)(self.config(**kw))
        if rope := dict(self.given).get('rope'): c.bind(layer=0, head_dim=None, rope=rope, rope_unknown=False, keep_live=False, model='')
        return c

def widths(method):
    "Legal ones of the four usual widths, as configurations"
    c, small = SERVABLE[method].cache_class, SMALL.get(method, {})
    found = [b for b in (2,3,4,8) if b in c.bit_widths] if c.bit_field else []
    return [Case(method, str(b), tuple((small|c.width_fields(b, D)).items())) for b in found] or [Case(method, 'default', tuple(small.items()))]

def variants(method): return [Case(method, n, tuple((SMALL.get(method, {})|kw).items())) for n,kw in VARIANTS.get(method, {}).items()]

CASES = [c for m in SERVABLE for c in [*widths(m), *variants(m)]] # all of them
FEW = [c for m in SERVABLE for c in [widths(m)[len(widths(m))//3], *variants(m)]] # one width, and the variants
ONE = [widths(m)[0] for m in SERVABLE] # one a method

def over(cases, test=lambda t: True): return pytest.mark.parametrize('case', [c for c in cases if test(c.traits)], ids=str)

# --- data


@dataclass
class Rows:
    q:mx.array # (B, H_q, n, D)
    k:mx.array # (B, H, n, D)
    v:mx.array # (B, H, n, D_v)
    def __iter__(self): return iter((self.q, self.k, self.v))
    def __getitem__(self, s): return Rows(*(x[:,:,s] for x in self))
    def batch(self, i): return Rows(*(x[i:i+1] for x in self))
    def astype(self, dtype): return Rows(*(x.astype(dtype) for x in self))
    @property
    def n(self): return self.k.shape[2]

def rows(n=T, B=1, H=H, n_rep=H_Q//H, D=D, D_v=None, seed=0, grid=1024):
    "Multiples of 1/grid that fp16 and bf16 hold exactly; channels of different size, as keys have them"
    rng = np.random.default_rng(seed)
    def draw(h, d):
        x = np.round(rng.standard_normal((B,h,n,d))*np.exp(rng.standard_normal(d)/2)*grid)/grid
        return mx.array(x.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32)
    out = Rows(draw(H*n_rep, D), draw(H, D), draw(H, D_v or D))
    mx.eval(*out)
    return out

def chunks_of(n, size): return (size,)*(n//size)+((n%size,) if n%size else ())

# --- calibrated caches

CALIBRATED = {} # (method, what of) → class of caches that find an artifact of rows like the tests' when the first ones come
if 'kvtc' in SERVABLE:
    from veloxquant_mlx.methods.kvtc import SCOPES, KVTCCache, open_bases, unit_tables

    @functools.cache
    def kvtc_arrays(scope, H, D, D_v):
        x, found = rows(H=H, D=D, D_v=D_v), dict(scope=mx.array(SCOPES.index(scope)), before_rope=mx.array(1), n=mx.array(T))
        for side,y in (('keys', x.k), ('values', x.v)):
            y = np.array(y)[0] if scope=='head' else np.moveaxis(np.array(y)[0], 0, 1).reshape(1, T, -1)
            found |= {f'{side}_{k}': mx.array(v.astype(np.float32)) for k,v in unit_tables(y).items()}
            found[f'{side}_mean'] *= 0 # rows of zeros are rows of zeros
        return found
    def kvtc_class(scope):
        class Calibrated(KVTCCache):
            def store(self, keys, values):
                H, D, D_v = *keys.shape[1::2], values.shape[3]
                if self.bases is None: self.mark, self.bases = open_bases(kvtc_arrays(scope, H, D, D_v), self.config, H)
                super().store(keys, values)
        Calibrated.__name__ = f'{scope.capitalize()}KVTCCache'
        setattr(mlx_lm.models.cache, Calibrated.__name__, Calibrated) # where a loaded cache looks for its class
        return Calibrated
    CALIBRATED |= {('kvtc', o): kvtc_class(o) for o in ('head', 'layer')}

# --- a model's part

def call(c, x, mask='made', sinks=None):
    "Store rows and attend, as a model of mlx-lm does"
    if isinstance(mask, str) and mask=='made': mask = c.make_mask(x.n)
    return mx.fast.scaled_dot_product_attention(x.q, *c.update_and_fetch(x.k, x.v), scale=SCALE, mask=mask, sinks=sinks)

def feed(c, x, chunks=None, attend=True):
    "Outputs of a prompt in one call or in chunks"
    c.expect_prompt(x.n)
    outs, at = [], 0
    for i,n in enumerate(chunks or (x.n,)):
        y, at = x[at:at+n], at+n
        if attend: outs.append(call(c, y))
        else: c.update_and_fetch(y.k, y.v)
        mx.eval(outs[-1:], [] if i%8 and at<x.n else c.state) # a model evaluates outputs only
    assert at==x.n
    return outs

def sees_queries(c, case): return bool(c.needs_queries or case.traits.prompt_end or case.traits.evicts or c.config.sliding_window)

def filled(case, x=None, chunks=None, **kw):
    "A cache with all rows of x; attention runs if the method has a use for it"
    x = rows() if x is None else x
    c = case.create(head_dim=x.k.shape[-1], **kw)
    feed(c, x, chunks, attend=sees_queries(c, case))
    return c

def step(seed=1, n=1, **kw): return rows(n, seed=seed, **kw)

# --- what is compared

def decoded(c):
    "The rows that a call of one token reads"
    k, v = c.keys_and_values()
    return k+0, v+0

def reads(c, x, mask=None, meant=None):
    "Which of the decoded rows a step reads: those that the mask's meaning shows, and of them what the method chooses, if it is one that does"
    if hasattr(c, 'row_positions'):
        at = c.row_positions()
        if meant is None and (at<0).any().item(): meant = mx.ones((x.n, c.offset), mx.bool_)
        if meant is not None: meant = columns(meant, at, x)
    rows = c.chosen(x.q, SCALE, mask) if hasattr(c, 'chosen') else None
    if rows is None: return meant
    B, H, n = rows.shape
    rows = mx.concatenate([mx.zeros((B,H,c.offset-c.first-n), mx.bool_), rows], axis=-1)
    rows = mx.repeat(rows, x.q.shape[1]//H, axis=1)[:,:,None]
    return rows if meant is None else rows & meant if meant.dtype==mx.bool_ else mx.where(rows, meant, -mx.inf)

def columns(mask, positions, x):
    "A mask over tokens as one over the rows that are left of them, for each head; rows without a position are nobody's"
    B, H_q, L = x.q.shape[:3]
    at = np.repeat(np.broadcast_to(np.array(positions), (B, x.k.shape[1], positions.shape[2])), H_q//x.k.shape[1], axis=1)
    full = np.broadcast_to(np.array(mask), (B, H_q, L, mask.shape[-1]))
    at = np.broadcast_to(at[:,:,None], (B, H_q, L, at.shape[2]))
    return mx.array(np.where(at<0, False if full.dtype==bool else full.dtype.type(-np.inf), np.take_along_axis(full, np.maximum(at, 0), axis=-1)))

def attention(q, k, v, mask=None, sinks=None):
    "Softmax attention by its definition"
    q, k, v = (np.array(o.astype(mx.float32)).astype(np.float64) for o in (q, k, v))
    L, n, n_rep = q.shape[2], k.shape[2], q.shape[1]//k.shape[1]
    s = SCALE*q@np.repeat(k, n_rep, 1).swapaxes(-1, -2)
    if isinstance(mask, str): mask = mx.arange(n)[None] <= mx.arange(n-L, n)[:,None]
    if mask is not None: s = np.where(np.array(mask), s, -np.inf) if mask.dtype==mx.bool_ else s+np.array(mask.astype(mx.float32))
    top = s.max(-1, keepdims=True)
    if sinks is not None: top = np.maximum(top, np.array(sinks)[:,None,None])
    p = np.exp(s-top)
    total = p.sum(-1, keepdims=True)
    if sinks is not None: total = total+np.exp(np.array(sinks)[:,None,None]-top)
    return p/total@np.repeat(v, n_rep, 1)

def causal(x): return attention(*x, mask='causal')

def close(a, b, eps=2e-5):
    a, b = (np.array(o.astype(mx.float32)) if isinstance(o, mx.array) else o for o in (a, b))
    return a.shape==b.shape and bool(np.all(np.abs(a-b) <= eps*(1+np.abs(b))))

def snapshot(arrays):
    "Shapes, dtypes and bytes of arrays: nothing that a cache does later changes them"
    plain = lambda a: np.array(a.astype(mx.float32) if a.dtype==mx.bfloat16 else a)
    return [(str(a.dtype), a.shape, plain(a).tobytes()) for a in arrays]

def stored(c): return snapshot(c.state)

def used(c, T, dtype=mx.float32):
    "Bytes of T tokens in full"
    B, H, D, D_v = c.shape
    return B*H*T*(D+D_v)*dtype.size

def exact_tokens(case, most=T):
    "How many tokens a fresh cache keeps exact: until its bytes, but for queries that it may have noted, differ from theirs, or until one is forgotten"
    if case.traits.evicts: return bisect.bisect(range(1, most+1), False, key=lambda n: filled(case, rows(n)).size()<n)
    c, x = case.create(), rows(most)
    for i in range(most):
        if case.traits.prompt_end: c.expect_prompt(most)
        call(c, x[i:i+1])
        if c.used_nbytes-sum(a.nbytes for a in c.watched())!=used(c, i+1): return i
    return most

def held(o, seen=None):
    "id → bytes of every array that can be reached from an object"
    seen = {} if seen is None else seen
    out = {}
    if id(o) in seen or isinstance(o, (str, bytes, int, float, type, type(None), mx.Dtype)): return out
    seen[id(o)] = o
    if isinstance(o, (mx.array, np.ndarray)): return {id(o): o.nbytes}
    inside = o.items() if isinstance(o, dict) else enumerate(o) if isinstance(o, (list, tuple, set, frozenset)) else vars(o).items() if hasattr(o, '__dict__') else ()
    for _,v in inside: out |= held(v, seen)
    return out
