"A cache of the engine that stores every row as it came, and what the integration tests share."
from contextlib import contextmanager
from dataclasses import fields
import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, CacheList
from veloxquant_mlx.cache.base import KVCacheBuilder, KVCacheConfig, KVCacheFactory
from veloxquant_mlx.core.errors import QuantizerConfigError
from veloxquant_mlx.engine.base import CompressedCache
from veloxquant_mlx.engine.hook import make_handle
from veloxquant_mlx.engine.registry import methods

METHODS = [k for k,o in sorted(methods().items()) if issubclass(o.cache_class, CompressedCache)]
def known(**settings): return {k: o for k,o in settings.items() if k in METHODS}
EXACT_TAIL = known(xkv={}, kvtc={}, minicache=dict(minicache_start_frac=1.), svdq=dict(svdq_group_size=128), cachegen=dict(cachegen_group_size=128), xquant={}, vecinfer={}, a2ats=dict(a2ats_codebook=mx.zeros((256,8)), a2ats_use_query_aware=False, a2ats_retrieval_fraction=1.), nsnquant=dict(nsn_residual_length=128), amc=dict(amc_group_size=128, amc_threshold_window=128), anchorkv={}, zipcache=dict(zipcache_group_size=128), kivi=dict(residual_length=128), kivi_sink=dict(residual_length=128), adakv={}, kvquant=dict(n_calib_tokens=256), age_tiered=dict(age_group_size=128), gear={}, kitty={}, skvq={})   # settings that keep a short context exact
EIGHT_BITS = known(xkv=dict(xkv_latent_bits=8, xkv_energy_threshold=1.), palu=dict(palu_hi_bit=8, palu_lo_bit=8, palu_energy_threshold=1.), kvtc={}, minicache=dict(minicache_retention_threshold=1.), svdq=dict(svdq_bit_schedule=(8,)), cachegen=dict(cachegen_resolved_bits=8), xquant=dict(xquant_base_bits=8, xquant_residual_bits=8), vecinfer=dict(key_sub_dim=1, key_codebook_bits=8, value_sub_dim=1, value_codebook_bits=8), a2ats=dict(a2ats_window=16, a2ats_codebook_bits=4, a2ats_retrieval_fraction=.8), nsnquant=dict(nsn_subvector_dim=1, nsn_codebook_size=128), amc=dict(amc_k_high=1., amc_k_mid=0.), anchorkv=dict(anchorkv_theta=1., anchorkv_residual_bits=4, anchorkv_anchor_frac=.5), zipcache=dict(zipcache_hi_bits=8, zipcache_lo_bits=8), age_tiered=dict(age_recent_boundary=10**6, age_mid_boundary=10**6), turboquant_rvq=dict(bit_width_inlier=8), kivi=dict(bit_width_inlier=8), kivi_sink=dict(bit_width_inlier=8), adakv=dict(adakv_lo_bit=7, adakv_mid_bit=8, adakv_hi_bit=8, adakv_target_avg_bits=7.9), kvquant=dict(kvquant_bits=8), gear=dict(gear_bits=8), kitty=dict(kitty_lo_bit=8, kitty_hi_bit=8), skvq=dict(skvq_bits_key=8, skvq_bits_value=8))
EARLY = known(svdq=dict(svdq_group_size=16), xquant=dict(residual_length=32), vecinfer=dict(residual_length=32, n_calib_tokens=32, key_codebook_bits=6), a2ats=dict(a2ats_window=16, a2ats_codebook_bits=4), nsnquant=dict(nsn_residual_length=32), anchorkv=dict(anchorkv_window=8), kivi=dict(residual_length=32), kivi_sink=dict(residual_length=32), adakv=dict(residual_length=32), kvquant=dict(n_calib_tokens=32), kitty=dict(residual_length=32), skvq=dict(n_calib_tokens=32, skvq_window=16))  # settings that pack after a few dozen tokens

READS_CODES = known(palu=dict(palu_energy_threshold=1., palu_hi_bit=8, palu_lo_bit=8)) # methods that read the first call from their codes too, and settings with which that is nearly exact

CALLS = 25, 14, 1, 1, 1, 2
LONG_CALLS = 170, *CALLS[1:] # the first call is packed in part by every quantizer
def prompt(n=sum(CALLS), seed=1): return mx.random.randint(0, 100, (1,n), key=mx.random.key(seed))

def run(model, caches, calls=CALLS, tokens=None):
    "Logits of each call"
    tokens = prompt(sum(calls)) if tokens is None else tokens
    outs,i = [],0
    for n in calls:
        outs.append(model(tokens[:,i:i+n], cache=caches))
        mx.eval(outs[-1])
        i += n
    return outs

FITS = known(xquant=dict(xquant_group_quant_size=16)) # without which a method refuses the small head dimensions of these models

def config(method, **kw):
    "Fields of the method go through its options object, shared ones directly"
    kw = FITS.get(method, {})|kw
    own = {k: kw.pop(k) for k in list(kw) if k in {f.name for f in fields(methods()[method].options)}}
    return KVCacheConfig(method=method, options=methods()[method].options(**own), **kw)

REFUSED = {o: f'must be a power of 2 for {o}' for o in ('nsnquant', 'vecinfer')} | dict(xquant='xquant_group_quant_size must divide') # how methods refuse a head dimension

@contextmanager
def dims_refused(method):
    "A model whose head dimensions the method refuses, with that message, is skipped"
    try: yield
    except QuantizerConfigError as e:
        if REFUSED.get(method, '\0') not in str(e): raise
        pytest.skip(str(e))

def create(method, head_dim, **kw): return KVCacheFactory.create(config(method, head_dim=head_dim, **kw))
def for_model(model, method, **kw): return KVCacheBuilder.for_model(model, config(method, **kw))

def flat(caches):
    "All entries, those inside a `CacheList` too"
    return [o for c in caches for o in (flat(c.caches) if type(c) is CacheList else [c])]

def ours(caches): return [c for c in flat(caches) if isinstance(c, CompressedCache)]

def relative_error(a, b): return (mx.sqrt(mx.mean((a-b)**2))/mx.std(b)).item()

class ExactCache(CompressedCache):
    "mlx-lm's rows behind our handles; counts what arrives"
    def __init__(self):
        super().__init__(KVCacheConfig())
        self.rows = KVCache()
        self.n_update = self.n_attend = self.n_sinks = 0

    @property
    def offset(self): return self.rows.offset
    @offset.setter
    def offset(self, n): pass
    @property
    def state(self): return [self.keys, self.values]

    def update_and_fetch(self, keys, values):
        self.n_update += 1
        self.keys,self.values = self.rows.update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self): return make_handle(self.keys, self, 'k'), make_handle(self.values, self, 'v')
    def make_mask(self, *args, **kwargs): return self.rows.make_mask(*args, **kwargs)

    def attend(self, queries, scale, mask=None, sinks=None):
        self.n_attend += 1
        self.n_sinks += sinks is not None
        return mx.fast.scaled_dot_product_attention(queries, self.keys, self.values, scale=scale, mask=mask, sinks=sinks)

def replace(caches, cls):
    "The same list with `cls()` for every entry that is exactly `KVCache`"
    def one(c):
        if type(c) is KVCache: return cls()
        if type(c) is CacheList: return CacheList(*[one(o) for o in c.caches])
        return c
    return [one(c) for c in caches]
