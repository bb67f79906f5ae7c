"What a cache lives through in mlx-lm: generation, files, copies, the server's prompt cache, speculative decoding, long decoding (items 5 and 7)."
import gc, copy,importlib,subprocess,sys
import mlx.core as mx
import pytest
from mlx_lm.models.cache import LRUPromptCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from exact import METHODS, EARLY, EXACT_TAIL, config, create, for_model, flat, ours, prompt, relative_error, run
from tiny_models import tiny
from veloxquant_mlx.cache.base import KVCacheBuilder

generate = importlib.import_module('mlx_lm.generate') # the package's `generate` is the function
MODELS = 'llama', 'gemma3', 'qwen3_next', 'falcon_h1' # plain, sliding windows, hybrid, `CacheList`
HEAD_DIM = 16

def same(a, b): return all(mx.array_equal(x, y) for x,y in zip(a, b))
def trimmable(method): return create(method, HEAD_DIM).is_trimmable()
TRIMMABLE = [o for o in METHODS if trimmable(o)]

def filled(name, method, calls=(320,1,1), **kw):
    model = tiny(name)
    caches = for_model(model, method, **kw)
    run(model, caches, calls)
    return model, caches

STEPS = 1,1,4,1
def go_on(model, caches): return run(model, caches, STEPS, prompt(sum(STEPS), seed=2))

# --- generation

def tokens(model, caches, n=12, text=prompt(40), **kw):
    return [t for t,_ in generate.generate_step(text[0], model, max_tokens=n, prompt_cache=caches, **kw)]

@pytest.mark.parametrize('method', METHODS)
def test_generate_step(method):
    model = tiny('llama')
    caches = for_model(model, method)
    assert len(tokens(model, caches, prefill_step_size=16)) == 12
    assert {c.offset for c in caches} == {52}
    again = for_model(model, method)
    assert tokens(model, again, prefill_step_size=16) == tokens(model, for_model(model, method), prefill_step_size=16)

@pytest.mark.parametrize('method', sorted(EXACT_TAIL))
def test_generate_step_while_all_is_exact(method):
    model = tiny('llama')
    assert tokens(model, for_model(model, method, **EXACT_TAIL[method]), prefill_step_size=16) == tokens(model, make_prompt_cache(model), prefill_step_size=16)

@pytest.mark.parametrize('name', MODELS)
def test_model_that_makes_our_caches(name):
    "`generate`, `batch_generate` and the server call `make_prompt_cache`; an attribute of the model answers"
    model = tiny(name)
    stock = [type(o) for o in make_prompt_cache(model)]
    model.make_cache = lambda: KVCacheBuilder.for_model(model, config(METHODS[0]))
    assert ours(make_prompt_cache(model))
    assert [type(o) for o in flat(make_prompt_cache(model))] == [type(o) for o in flat(for_model(model, METHODS[0]))]
    del model.make_cache
    assert [type(o) for o in make_prompt_cache(model)] == stock

# --- files and copies

@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('name', MODELS)
def test_save_and_load(method, name, tmp_path):
    model,caches = filled(name, method)
    path = str(tmp_path/'cache.safetensors')
    save_prompt_cache(path, caches, dict(note='x'))
    loaded,meta = load_prompt_cache(path, return_metadata=True)
    assert meta == dict(note='x')
    assert [type(o) for o in flat(loaded)] == [type(o) for o in flat(caches)]
    assert [c.offset for c in ours(loaded)] == [c.offset for c in ours(caches)]
    want = go_on(model, caches)
    assert same(go_on(model, loaded), want)
    assert [c.offset for c in ours(loaded)] == [c.offset for c in ours(caches)]

@pytest.mark.parametrize('method', METHODS)
def test_save_and_load_of_an_empty_cache(method, tmp_path):
    model = tiny('llama')
    path = str(tmp_path/'cache.safetensors')
    save_prompt_cache(path, for_model(model, method))
    loaded = load_prompt_cache(path)
    assert len(loaded) == 3 and all(c.empty() for c in loaded)
    assert same(run(model, loaded), run(model, for_model(model, method)))

LOAD = """
import sys, mlx.core as mx
import veloxquant_mlx.cache.base
from mlx_lm.models.cache import load_prompt_cache
print(*[type(o).__name__ for o in load_prompt_cache(sys.argv[1])])
"""
def test_load_in_a_new_process(tmp_path):
    caches = [create(m, HEAD_DIM) for m in METHODS]
    for c in caches: c.update_and_fetch(mx.ones((1,2,9,HEAD_DIM)), mx.ones((1,2,9,HEAD_DIM)))
    path = str(tmp_path/'cache.safetensors')
    save_prompt_cache(path, caches)
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', LOAD, path], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [type(c).__name__ for c in caches]

@pytest.mark.parametrize('method', METHODS)
def test_state(method):
    "A flat list of arrays, never empty; both spellings of `from_state`; evaluating it changes nothing"
    model,caches = filled('llama', method)
    for c in [create(method, HEAD_DIM), *caches]:
        assert type(c.state) is list and c.state and all(type(o) is mx.array for o in c.state)
    again = [type(c).from_state(c.state, '') for c in caches]
    restored = [type(c).from_state(c.state) for c in caches]
    want = go_on(model, caches)
    assert same(go_on(model, again), want) and same(go_on(model, restored), want)

@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('name', MODELS)
def test_deepcopy(method, name):
    "A copy continues identically, and neither touches the other"
    model,caches = filled(name, method)
    copies = copy.deepcopy(caches)
    run(model, copies, (30,1), prompt(31, seed=5))
    again = copy.deepcopy(caches)
    want = go_on(model, caches)
    assert same(go_on(model, again), want)

# --- the server's prompt cache

def lru(caches, toks):
    out = LRUPromptCache()
    out.insert_cache('m', toks, caches)
    return out

@pytest.mark.parametrize('method', METHODS)
def test_lru_exact(method):
    model = tiny('llama')
    caches,toks = for_model(model, method), prompt(320)[0].tolist()
    run(model, caches, (319,1), mx.array([toks]))
    store = lru(caches, toks)
    assert store.nbytes == sum(c.nbytes for c in caches) > 0
    (a,rest),(b,_) = store.fetch_nearest_cache('m', toks), store.fetch_nearest_cache('m', toks)
    assert rest == [] and a[0] is not caches[0]
    assert same(go_on(model, a), go_on(model, b))

@pytest.mark.parametrize('method', METHODS)
def test_lru_shorter(method):
    "A stored prefix is copied and continued"
    model = tiny('llama')
    caches,toks = for_model(model, method), prompt(320)[0].tolist()
    run(model, caches, (299,1), mx.array([toks[:300]]))
    got,rest = lru(caches, toks[:300]).fetch_nearest_cache('m', toks)
    assert rest == toks[300:]
    assert same(run(model, got, (20,), mx.array([rest])), run(model, caches, (20,), mx.array([rest])))
    assert {c.offset for c in got} == {320}

@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('n', [155,77])
def test_lru_longer(method, n):
    "A stored continuation is cut back, by exactly the tokens that differ, if the method can"
    model = tiny('llama')
    caches,toks = for_model(model, method, **EARLY.get(method, {})), prompt(160)[0].tolist()
    run(model, caches, (150,)+(1,)*10, mx.array([toks]))
    ask = toks[:n] + [(toks[n]+1)%100, 7]
    got,rest = lru(caches, toks).fetch_nearest_cache('m', ask)
    if not caches[0].is_trimmable():
        assert got is None and rest == ask
        return
    assert rest == ask[n:] and {c.offset for c in got} == {n}
    assert {c.offset for c in caches} == {160}
    out = run(model, got, (2,1), mx.array([rest+[5]]))
    assert all(mx.isfinite(o).all() for o in out) and {c.offset for c in got} == {n+3}

@pytest.mark.parametrize('method', sorted(EXACT_TAIL))
def test_lru_longer_inside_the_exact_tail(method):
    model = tiny('llama')
    caches,toks = for_model(model, method, **EXACT_TAIL[method]), prompt(60)[0].tolist()
    run(model, caches, (50,)+(1,)*10, mx.array([toks]))
    got,rest = lru(caches, toks).fetch_nearest_cache('m', toks[:30]+[5,7])
    fresh = make_prompt_cache(model)
    run(model, fresh, (30,), mx.array([toks[:30]]))
    rest = mx.array([rest+[5]])
    assert max(relative_error(a, b) for a,b in zip(run(model, got, (2,1), rest), run(model, fresh, (2,1), rest))) < 1e-5

# --- speculative decoding

def speculative(model, draft, caches, n=20, k=3, text=prompt(40)):
    return [t for t,_,_ in generate.speculative_generate_step(text[0], model, draft, num_draft_tokens=k, max_tokens=n,
        prompt_cache=caches+make_prompt_cache(draft), prefill_step_size=16)]

@pytest.mark.parametrize('seed', [0,1], ids=['good draft','bad draft'])
@pytest.mark.parametrize('method', sorted(EXACT_TAIL))
def test_speculative_equals_greedy(method, seed):
    model,draft = tiny('llama'), tiny('llama', seed)
    caches = for_model(model, method, **EXACT_TAIL[method])
    assert speculative(model, draft, caches) == tokens(model, for_model(model, method, **EXACT_TAIL[method]), 20)
    assert len({c.offset for c in caches}) == 1

@pytest.mark.parametrize('seed', [0,1], ids=['good draft','bad draft'])
@pytest.mark.parametrize('method', TRIMMABLE)
def test_speculative_keeps_count(method, seed):
    "Rejected tokens leave the cache, whatever block they reopen"
    model,draft = tiny('llama'), tiny('llama', seed)
    caches = for_model(model, method, **EARLY.get(method, {}))
    assert len(speculative(model, draft, caches, 60, text=prompt(90))) == 60
    assert {c.offset for c in caches} in ({149},{150}) # 90 + 60, the last one perhaps not fed

@pytest.mark.parametrize('method', [o for o in METHODS if o not in TRIMMABLE])
def test_speculative_refuses_evicting_caches(method):
    model = tiny('llama')
    with pytest.raises(ValueError, match='requires a trimmable prompt cache'): speculative(model, model, for_model(model, method))

# --- memory

def active():
    "Bytes that are in use, earlier tests' garbage collected"
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()

def grown(before): return active()-before

def reuse(caches):
    "MLX hands out freed buffers that are up to 16 kB larger than the array"
    return 16_384*sum(len(c.payload()) for c in caches)

@pytest.mark.parametrize('chunk', [1000,256])
@pytest.mark.parametrize('method', METHODS)
def test_no_dense_layer_is_held_after_a_prefill(method, chunk):
    "Between calls a process holds the bytes that the caches report, give or take 16 kB an array that MLX may reuse"
    model = tiny('llama_d64')
    caches,text = for_model(model, method), prompt(1000)
    mx.eval(text)
    before = active()
    for i in range(0, 1000, chunk):
        model(text[:,i:i+chunk], cache=caches)
        mx.eval([c.state for c in caches])
    dense = 1000*2*64*4*2*len(caches) # of all layers, both sides
    assert reuse(caches) < dense/2
    assert abs(grown(before)-sum(c.nbytes for c in caches)) < reuse(caches)

@pytest.mark.parametrize('method', METHODS)
def test_long_decode_grows_by_what_is_stored(method):
    "mlx-lm evaluates logits only; nothing else may pile up"
    model = tiny('llama_d32')
    run(model, for_model(model, method), (32, *[1]*300)) # what earlier tests left is let go of
    caches = for_model(model, method)
    run(model, caches, (32,1))
    before = active()-sum(c.nbytes for c in caches)
    y = mx.array([[1]])
    for _ in range(1500):
        y = mx.argmax(model(y, cache=caches), axis=-1)
        mx.eval(y)
    assert caches[0].offset == 1533
    assert abs(grown(before)-sum(c.nbytes for c in caches)) < reuse(caches)
