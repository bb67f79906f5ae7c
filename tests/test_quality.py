"""Quality and bytes of every method on the embedded model.

The text is that of `evaluate.corpus`: 512 tokens in one call, then 512 in chunks of 16. Bounds are in nats a token above the plain
cache; they come from simulations of the plain algorithms. A method that stores eight bits must be all but exact."""
import pytest
from mlx_lm.models.cache import make_prompt_cache
from veloxquant_mlx.cache.base import KVCacheConfig
from veloxquant_mlx.cache.options import GEAROptions, KVQuantOptions
from veloxquant_mlx.evaluate.compare import cache_maker, formula_bytes
from veloxquant_mlx.evaluate.corpus import corpus_tokens
from veloxquant_mlx.evaluate.memory import memory_report
from veloxquant_mlx.evaluate.needle import needle_found
from veloxquant_mlx.evaluate.quality import continuation_nll
from veloxquant_mlx.models.load import load_model

CONFIGS = dict(
    rvq4=KVCacheConfig('turboquant_rvq', bit_width_inlier=4), rvq8=KVCacheConfig('turboquant_rvq', bit_width_inlier=8),
    kivi2=KVCacheConfig('kivi'), kivi4=KVCacheConfig('kivi', bit_width_inlier=4), kivi8=KVCacheConfig('kivi', bit_width_inlier=8),
    kvquant3=KVCacheConfig('kvquant'), kvquant3_512=KVCacheConfig('kvquant', n_calib_tokens=511), kvquant4=KVCacheConfig('kvquant', options=KVQuantOptions(kvquant_bits=4)),
    kvquant8=KVCacheConfig('kvquant', n_calib_tokens=511, options=KVQuantOptions(kvquant_bits=8)),
    gear2=KVCacheConfig('gear'), gear4=KVCacheConfig('gear', options=GEAROptions(gear_bits=4)), gear8=KVCacheConfig('gear', options=GEAROptions(gear_bits=8)))
NLL = dict(rvq4=.09, kivi4=.03, kvquant3_512=.08, rvq8=.01, kivi8=.01, kvquant8=.01, gear8=.01)
HELD = dict(rvq4=.28, kivi2=.27, kvquant3=.27, gear2=.36)

@pytest.fixture(scope='module')
def loaded(): return load_model(progress=False)

@pytest.fixture(scope='module')
def measure(loaded):
    "NLL above the plain cache and a memory report, each configuration measured once"
    model, tokenizer = loaded
    tokens, seen = corpus_tokens(tokenizer, 1024), {}
    def one(name):
        if name not in seen:
            cache = cache_maker(model, CONFIGS[name])() if name!='plain' else make_prompt_cache(model)
            nll = continuation_nll(model, tokens, cache, prefill=512, chunk=16, progress=False).nll
            seen[name] = nll, memory_report(cache), formula_bytes(cache)
        return seen[name]
    return lambda name: (one(name)[0]-one('plain')[0], *one(name)[1:])

@pytest.mark.parametrize('name', NLL)
def test_nll(measure, name): assert measure(name)[0]<=NLL[name]

def test_gear_is_no_worse_than_its_parent(measure): assert measure('gear2')[0]<=measure('kivi2')[0]

def test_kvquant_gains_from_more_calibration(measure): assert measure('kvquant3_512')[0]<measure('kvquant3')[0]<.15

@pytest.mark.parametrize('name', HELD)
def test_held_bytes(measure, name):
    _, size, formula = measure(name)
    assert size.held/size.fp16<=HELD[name]
    assert abs(size.used/formula-1)<.03

@pytest.mark.parametrize('name', ['plain', 'rvq4', 'kivi4', 'kvquant4', 'gear4'])
def test_needle(loaded, name):
    model, tokenizer = loaded
    make = None if name=='plain' else cache_maker(model, CONFIGS[name])
    assert needle_found(model, tokenizer, make, context=1024, depth=.5, progress=False).found
