"Every module of mlx-lm that can be built small: what reaches the hook, what `for_model` replaces, what comes out."
import re
import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from exact import METHODS, EIGHT_BITS, CALLS, LONG_CALLS, ExactCache, run, replace, for_model, flat, ours, prompt, relative_error, dims_refused, READS_CODES
from tiny_models import NAMES, NO_KV, BY_HAND, MLA_NAMES, SPARSE, tiny
from veloxquant_mlx.engine.base import CompressedCache
from veloxquant_mlx.engine.hook import install
from veloxquant_mlx.engine.layers import cache_slots, describe, layer_rope, text_model
from veloxquant_mlx.ops.rope import invert_rope

KV_NAMES = [o for o in NAMES if o not in NO_KV]
CORE = 'llama', 'qwen3', 'gemma3', 'gpt_oss', 'mixtral', 'qwen3_next', 'deepseek_v2', 'deepseek_v3', 'falcon_h1', 'gemma3n', 'afm7', 'qwen2_vl'

@pytest.mark.parametrize('name', [o for o in KV_NAMES if o not in SPARSE])
def test_exact_rows_give_the_stock_logits(name):
    "A handle behaves like the array it stands for, bit for bit, whether a model attends, computes by hand or shares it"
    model = tiny(name)
    stock = run(model, make_prompt_cache(model))
    install()
    caches = replace(make_prompt_cache(model), ExactCache)
    assert all(mx.array_equal(a, b) for a,b in zip(run(model, caches), stock))
    for c in ours(caches):
        assert c.n_update == len(CALLS)
        if name in BY_HAND|MLA_NAMES: assert c.n_attend == 0
        else: assert c.n_attend >= c.n_update

@pytest.mark.parametrize('name', ['gpt_oss', 'mimo_v2_flash'])
def test_sinks_reach_the_cache(name):
    model = tiny(name)
    install()
    caches = replace(make_prompt_cache(model), ExactCache)
    run(model, caches)
    assert all(c.n_sinks == c.n_attend > 0 for c in ours(caches))

@pytest.mark.parametrize('name', ['gpt_oss', 'mimo_v2_dense'])
@pytest.mark.parametrize('method', sorted(EIGHT_BITS))
def test_eight_bits_with_sinks(name, method):
    "Ignored sinks move these logits by a quarter; no experts in the second model, whose choice may flip on any change"
    model = tiny(name)
    stock = run(model, make_prompt_cache(model), (200,)+(1,)*8)
    with dims_refused(method): caches = for_model(model, method, **EIGHT_BITS[method])
    for a,b in zip(run(model, caches, (200,)+(1,)*8), stock): assert relative_error(a, b) < .05

def nth_method(name): return METHODS[NAMES.index(name) % len(METHODS)]

@pytest.mark.parametrize('name,method', [(o, nth_method(o)) for o in KV_NAMES] + [(o, m) for o in CORE for m in METHODS if m!=nth_method(o)])
def test_for_model(name, method):
    "Exactly the `KVCache` entries are replaced; a first call is read exactly, later ones work"
    model = tiny(name)
    stock = make_prompt_cache(model)
    try: caches = for_model(model, method, **READS_CODES.get(method, {}))
    except ValueError as e: pytest.skip(str(e))
    assert len(caches)==len(stock) and len(flat(caches))==len(flat(stock))
    for a,b in zip(flat(caches), flat(stock)):
        if type(b) is not KVCache: assert type(a) is type(b)
    if name in SPARSE: # layers with an index cache beside their rows
        for a,b in zip(caches, stock): assert len(b.caches)==1 or [type(o) for o in a.caches]==[KVCache]*2
    if name not in MLA_NAMES|SPARSE: assert len(ours(caches)) == sum(type(o) is KVCache for o in flat(stock)) > 0
    want = run(model, stock, LONG_CALLS)
    try:
        with dims_refused(method): got = run(model, caches, LONG_CALLS)
    except RuntimeError as e:
        assert name in BY_HAND and re.match(f'{method}: attention hook bypassed by', str(e))
        return
    assert relative_error(got[0], want[0])<.1 if method in READS_CODES else mx.allclose(got[0], want[0], atol=1e-4, rtol=1e-4)
    assert all(mx.isfinite(o).all() for o in got)
    assert {c.offset for c in ours(caches)} <= {sum(LONG_CALLS)}

@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('name', ['llama', 'gpt_oss', 'falcon_h1'])
def test_rows_of_a_batch_are_independent(name, method):
    "Up to a code that rounding tips over"
    model,tokens = tiny(name), prompt(2*200).reshape(2,-1)
    calls = 180,17,1,1,1
    both = run(model, for_model(model, method), calls, tokens)
    for i in 0,1:
        for a,b in zip(run(model, for_model(model, method), calls, tokens[i:i+1]), both): assert relative_error(a[0], b[i]) < 1e-3

@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
def test_half_precision_models(method, dtype):
    model,dtype = tiny('llama'), getattr(mx, dtype)
    model.set_dtype(dtype)
    want,got = (run(model, c, (150,1,1)) for c in (make_prompt_cache(model), for_model(model, method, **READS_CODES.get(method, {}))))
    assert relative_error(got[0], want[0])<.1 if method in READS_CODES else mx.allclose(got[0], want[0], atol=1e-2)
    assert all(o.dtype==dtype and mx.isfinite(o).all() for o in got)

# --- what `for_model` knows of a model

@pytest.mark.parametrize('name', sorted(MLA_NAMES))
def test_latent_attention_is_left_alone_by_methods_that_need_queries(name):
    for queries in False,True:
        _,slots = cache_slots(text_model(tiny(name)), queries)
        assert {bool(o.reason) for o in slots if type(o.cache) is KVCache} == {queries}

@pytest.mark.parametrize('name', ['qwen2_vl', 'qwen3_vl', 'gemma3', 'pixtral', 'mistral3', 'lfm2-vl'])
def test_wrapper_and_its_language_model(name):
    model = tiny(name)
    whole,part = for_model(model, METHODS[0]), for_model(model.language_model, METHODS[0])
    assert [type(o) for o in flat(whole)] == [type(o) for o in flat(part)]
    assert ours(whole)

@pytest.mark.parametrize('name', CORE)
def test_describe(name):
    "One row per cache; what stays says why"
    caches = for_model(tiny(name), METHODS[0])
    rows = describe(caches)
    assert len(rows) == len(flat(caches))
    for r,c in zip(rows, flat(caches)):
        assert r['cache'] == type(c).__name__ and r['details']
        assert r['method'] == (METHODS[0] if isinstance(c, CompressedCache) else 'none')

ROTATED_ANYHOW = {'afm7', 'dbrx', 'deepseek_v2', 'gemma3n', 'gemma4', 'gemma4_text', 'iquestloopcoder', 'minicpm3', 'nanochat', 'talkie', 'youtu_llm'}                 # RoPE is not found: methods that undo it work on rotated keys
NORM_AFTER_ROPE = {'hunyuan', 'hunyuan_v1_dense'}           # a norm with channel weights follows the rotation
NO_ROPE = {'gpt2', 'gpt_bigcode'}                           # learned positions are in the embedding

@pytest.mark.parametrize('name', [o for o in KV_NAMES if o not in MLA_NAMES|SPARSE|NORM_AFTER_ROPE|NO_ROPE])
def test_rope_of_a_layer_can_be_undone(name):
    "Keys of one token at every position are equal once the rotation is taken back"
    model = tiny(name)
    stock,slots = cache_slots(text_model(model))
    install()
    caches = replace(stock, ExactCache)
    if any(type(c) is ArraysCache for c in flat(stock)) or 'mimo' in name or name=='gpt_oss':  # other layers depend on the position: alone
        x = mx.broadcast_to(mx.random.normal((64,), key=mx.random.key(3)), (1,30,64))
        for s,c in zip(slots, flat(caches)):
            if isinstance(c, ExactCache) and s.attention: s.attention(x, 'causal', caches[s.entry] if name=='baichuan_m1' else c)
    else: model(mx.full((1,30), 7), cache=caches)
    for s,c in zip(slots, flat(caches)):
        if not isinstance(c, ExactCache) or not c.offset: continue
        rows = invert_rope(c.keys, layer_rope(s.attention), 0)[:,:,4:]
        same = mx.allclose(rows, rows[:,:,:1], atol=1e-4*mx.abs(rows).max().item())
        assert same.item() == (name not in ROTATED_ANYHOW)
