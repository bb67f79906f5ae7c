"Layers that act together: linked caches, called layer by layer as a model does. What one cache does alone, the other files test."
import copy, gc, itertools, weakref
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
from cases import *
from veloxquant_mlx.engine.crosslayer import CrossLayerCache
from veloxquant_mlx.evaluate.memory import held_bytes

LAYERS = 5
PAIRS = dict(pairs={})
GROUPS = dict( # fields of the method, by name; the default group of two leaves the fifth layer alone
    xkv=dict(pairs={}, paper=dict(xkv_latent_bits=16, xkv_rank=40), segments=dict(xkv_max_ctx=256), three=dict(xkv_group_size=3, xkv_rank=60, xkv_latent_bits=3)),
    xquant=dict(pairs={}, paper=dict(xquant_residual_bits=0), horizon=dict(xquant_max_ctx=96), three=dict(xquant_group_size=3, xquant_residual_bits=1, xquant_base_bits=3)),
    minicache={n: dict(minicache_start_frac=0.)|kw for n,kw in dict(pairs={}, paper=dict(minicache_retention_threshold=.05), segments=dict(minicache_retention_threshold=.3, minicache_max_ctx=96), three=dict(minicache_group_size=3, minicache_retention_threshold=.5, minicache_slerp_t=.3)).items()})
EVERY = [(m, n) for m in SERVABLE if issubclass(SERVABLE[m].cache_class, CrossLayerCache) for n in GROUPS.get(m, PAIRS)]
every = pytest.mark.parametrize('method,name', EVERY, ids=['-'.join(o) for o in EVERY])
pytestmark = pytest.mark.filterwarnings('ignore:.*(does not resemble|codes of their own|little in common)')

def linked(method, name, n=LAYERS, **kw): return SERVABLE[method].cache_class.linked(n, **SMALL.get(method, {})|GROUPS.get(method, PAIRS)[name]|dict(head_dim=D)|kw)

def layers(n=T, seed=0, count=LAYERS, rho=.9, **kw):
    "Rows of neighbouring layers, which resemble each other"
    own = [rows(n, seed=seed+100*i, **kw) for i in range(count)]
    mix = lambda a, b: (rho*a+(1-rho**2)**.5*b).astype(mx.bfloat16).astype(mx.float32)
    return [o if i==0 else Rows(o.q, mix(own[0].k, o.k), mix(own[0].v, o.v)) for i,o in enumerate(own)]

def cut(xs, s): return [x[s] for x in xs]
def step_all(caches, xs, **kw): return [call(c, x, **kw) for c,x in zip(caches, xs, strict=True)]

def feed_all(caches, xs, chunks=None, announce=True):
    "A prompt, in one call or in chunks"
    outs, at = [], 0
    if announce:
        for c in caches: c.expect_prompt(xs[0].n)
    for n in chunks or (xs[0].n,):
        outs.append(step_all(caches, cut(xs, slice(at, at+n))))
        mx.eval(outs[-1], [c.state for c in caches])
        at += n
    assert at==xs[0].n
    return [mx.concatenate(o, axis=2) for o in zip(*outs)]

def filled_all(method, name, xs=None, chunks=None, **kw):
    xs = layers() if xs is None else xs
    caches = linked(method, name, len(xs), **kw)
    feed_all(caches, xs, chunks)
    return caches

def stored_all(caches): return [snapshot([c.state[0][9+5:] if i==0 else a for i,a in enumerate(c.state)]) for c in caches] # without the list's name and seats
def go_on(caches, seed=30, **kw):
    xs, outs, at = layers(44, seed=seed, count=len(caches), **kw), [], 0
    for n in (1,1,5,1,35,1):
        outs += step_all(caches, cut(xs, slice(at, at+n)))
        at += n
    mx.eval(outs, [c.state for c in caches])
    return outs

def same(a, b): return all(mx.array_equal(x, y) for x,y in zip(a, b, strict=True))
def groups(caches): return {c.group for c in caches}

# --- what is stored and read

def test_groups_are_formed():
    for method,name in EVERY:
        caches = linked(method, name)
        assert sorted(itertools.chain(*groups(caches)))==list(range(LAYERS)) and max(map(len, groups(caches)))>1, (method, name)
        assert all(f'shares with layer {(c.group[0] if c.rank else c.group[1])}' in c.details() for c in caches if len(c.group)>1)

@every
def test_a_prompt_is_read_exactly(method, name):
    xs = layers()
    for out,x in zip(feed_all(linked(method, name), xs), xs): assert close(out, causal(x))

@every
def test_a_step_reads_the_stored_rows(method, name):
    "Each layer its own, with sinks and without"
    caches, ys = filled_all(method, name), layers(1, seed=7)
    for c,y in zip(caches, ys):
        for sinks in None, mx.array(np.random.default_rng(5).standard_normal(H_Q).astype(np.float32)):
            if sinks is None: handles = c.update_and_fetch(y.k, y.v)
            out = mx.fast.scaled_dot_product_attention(y.q, *handles, scale=SCALE, sinks=sinks)
            assert close(out, attention(y.q, *decoded(c), sinks=sinks))

@every
def test_chunking_does_not_change_what_is_stored(method, name):
    xs = layers()
    once = stored_all(filled_all(method, name, xs))
    for chunks in (T-70,)+(1,)*70, chunks_of(T, 13), (T-1,1), (31,1,128,130): assert stored_all(filled_all(method, name, xs, chunks))==once, len(chunks)

@every
def test_rows_of_a_batch_are_independent(method, name):
    xs, ys = layers(B=2), layers(1, seed=5, B=2)
    both = filled_all(method, name, xs)
    got = step_all(both, ys)
    for i in 0,1:
        alone = filled_all(method, name, [x.batch(i) for x in xs])
        for g,w,a,b in zip(got, step_all(alone, [y.batch(i) for y in ys]), both, alone):
            assert close(g[i:i+1], w) and all(close(p[i:i+1], q) for p,q in zip(decoded(a), decoded(b)))

@every
def test_layers_use_each_other(method, name):
    "What a layer reads depends on the first layer of its group, and alone it would read something else"
    xs = layers()
    other = [Rows(xs[0].q, xs[0].k[:,:,::-1], xs[0].v[:,:,::-1]), *xs[1:]]
    a, b, alone = filled_all(method, name, xs), filled_all(method, name, other), [filled_all(method, name, [x]) for x in xs]
    for i in range(LAYERS):
        differs = [not mx.array_equal(p, q) for p,q in zip(decoded(a[i]), decoded(b[i]))]
        assert all(differs) if i in a[0].group else not any(differs), i
        if len(a[i].group)==1: assert all(mx.array_equal(p, q) for p,q in zip(decoded(a[i]), decoded(alone[i][0]))), i

@every
@pytest.mark.parametrize('dtype', [mx.float16, mx.bfloat16])
def test_dtypes(method, name, dtype):
    xs, ys = [x.astype(dtype) for x in layers()], [y.astype(dtype) for y in layers(1, seed=7)]
    caches = filled_all(method, name, xs)
    for out,c in zip(step_all(caches, ys), caches): assert out.dtype==dtype and mx.isfinite(out).all() and all(mx.isfinite(o).all() for o in decoded(c))

@every
def test_head_dims(method, name):
    caches, ys = filled_all(method, name, layers(D=48, D_v=32), head_dim=48), layers(1, seed=7, D=48, D_v=32)
    for out,c,y in zip(step_all(caches, ys), caches, ys): assert close(out, attention(y.q, *decoded(c)))

# --- copies, files

COPIES = dict(list=copy.deepcopy, one_by_one=lambda l: [copy.deepcopy(c) for c in l], backwards=lambda l: [copy.deepcopy(c) for c in l[::-1]][::-1],
    state=lambda l: [type(c).from_state(c.state) for c in l])

@every
@pytest.mark.parametrize('how', COPIES)
@pytest.mark.parametrize('n', [20,T])
def test_copies(method, name, how, n):
    "Go on alike, in both directions, and are found by their layers; a third is made while the second lives"
    caches = filled_all(method, name, layers(n))
    before = stored_all(caches)
    new, third = COPIES[how](caches), COPIES[how](caches)
    assert all(b is l[b.seat] for l in (new, third) for c in l for b in c.members)
    want = go_on(new)
    assert stored_all(caches)==before==stored_all(third)
    assert same(go_on(caches), want) and same(go_on(third), want) and stored_all(caches)==stored_all(new)==stored_all(third)

@every
def test_copies_of_an_empty_list(method, name):
    for how in COPIES.values():
        a = linked(method, name)
        b = how(a)
        feed_all(b, layers())
        assert all(c.empty() for c in a) and stored_all(b)==stored_all(filled_all(method, name))

@every
def test_files(method, name, tmp_path):
    path = str(tmp_path/'cache.safetensors')
    caches = filled_all(method, name)
    save_prompt_cache(path, caches)
    a, b = load_prompt_cache(path), load_prompt_cache(path)
    want = go_on(caches)
    assert same(go_on(b), want) and same(go_on(a), want)
    save_prompt_cache(path, a) # a loaded list is saved again, while it and the first are there
    again = load_prompt_cache(path)
    assert same(go_on(again, 60), go_on(caches, 60)) and same(go_on(a, 60), go_on(b, 60))

@every
def test_states_are_set(method, name):
    caches, new = filled_all(method, name), linked(method, name)
    for c,d in zip(caches, new): d.state = c.state
    assert stored_all(new)==stored_all(caches) and same(go_on(new), go_on(caches))

@every
def test_a_layer_whose_group_is_gone(method, name):
    caches = filled_all(method, name)
    last = caches[caches[0].group[-1]]
    del caches
    gc.collect()
    y = step()
    with pytest.raises(RuntimeError, match=f'^{method}: the group of layer {last.seat} is not complete'): last.update_and_fetch(y.k, y.v)

# --- trimming

@every
def test_trim(method, name):
    xs = layers()
    full = filled_all(method, name, xs)
    before = [decoded(c) for c in copy.deepcopy(full)]
    for n in (1, 2, 8, 31, 33, 100, 150, 200, 257, T-1, T, T+9):
        caches, left = copy.deepcopy(full), max(0, T-n)
        assert {c.trim(n) for c in caches}=={min(n, T)} and {c.offset for c in caches}=={left}
        for c,b in zip(caches, before):
            if left: assert all(close(p, q[:,:,:left]) for p,q in zip(decoded(c), b)), n
        assert sum(c.nbytes for c in caches)==held_bytes(caches)
        again = [type(c).from_state(c.state) for c in caches]
        assert same(go_on(again), go_on(caches)), n
        ys = layers(1, seed=7)
        for out,c,y in zip(step_all(caches, ys), caches, ys): assert close(out, attention(y.q, *decoded(c))), n

@every
def test_trim_of_the_last_tokens_again_and_again(method, name):
    caches, xs = filled_all(method, name), layers(100, seed=2)
    for i in range(0, 100, 5):
        step_all(caches, cut(xs, slice(i, i+5)))
        assert {c.trim(3) for c in caches}=={3}
    assert {c.offset for c in caches}=={T+40} and all(mx.isfinite(o).all() for c in caches for o in decoded(c))

@every
def test_a_fresh_prompt(method, name):
    caches, xs = filled_all(method, name), layers(200, seed=2)
    for c in caches: c.trim(T)
    feed_all(caches, xs)
    assert stored_all(caches)==stored_all(filled_all(method, name, xs))

# --- order

@every
def test_out_of_step(method, name):
    "A later layer first, or a layer twice: both counts are named and nothing changes"
    caches, y = filled_all(method, name), step()
    before = stored_all(caches)
    a, b = (caches[i] for i in caches[0].group[:2])
    with pytest.raises(RuntimeError, match=f'^{method}: layer {b.seat} would hold {T+1} tokens, layer {a.seat} of its group holds {T}$'): b.update_and_fetch(y.k, y.v)
    assert stored_all(caches)==before
    call(a, y)
    with pytest.raises(RuntimeError, match=f'^{method}: layer {b.seat} holds {T} tokens, layer {a.seat} of its group {T+1}$'): a.update_and_fetch(y.k, y.v)
    call(b, y)

@every
def test_other_heads_end_a_group(method, name):
    "Found out with the first rows: the layers go on in smaller groups"
    caches, xs = linked(method, name, 2), layers(count=2)
    xs[1] = rows(seed=9, H=4, n_rep=1)
    caches = linked(method, name, 2)
    for out,x in zip(feed_all(caches, xs), xs): assert close(out, causal(x))
    assert [c.group for c in caches]==[(0,),(1,)] and all('its neighbour has other heads' in c.details() for c in caches)
    alone = filled_all(method, name, xs[1:])
    assert all(mx.array_equal(p, q) for p,q in zip(decoded(caches[1]), decoded(alone[0])))

# --- bytes

@every
def test_bytes(method, name):
    "Parts of shared arrays add up to what is there; the formula adds up too"
    for n in (5, 40, T, 600):
        caches = filled_all(method, name, layers(n))
        assert sum(c.nbytes for c in caches)==held_bytes(caches) and sum(c.used_nbytes for c in caches)<=held_bytes(caches), n
        assert abs(sum(c.used_nbytes for c in caches)/sum(c.formula_nbytes(n) for c in caches)-1)<.03, n

@every
def test_a_list_is_freed(method, name):
    refs = []
    def live():
        caches = filled_all(method, name)
        refs.extend(weakref.ref(o) for c in caches for o in (c, c.coordinator))
    live()
    assert not any(r() for r in refs) # without the collector of cycles: nothing holds a cache but its list

@every
def test_decoding_piles_nothing_up(method, name):
    "Only outputs are evaluated"
    def decode():
        caches, xs = filled_all(method, name, layers(150)), layers(40, seed=4)
        for i in range(40): mx.eval(step_all(caches, cut(xs, slice(i, i+1))))
        return caches
    for _ in range(2):
        caches = None
        gc.collect(); mx.clear_cache()
        before = mx.get_active_memory()
        caches = decode()
        mx.eval([c.state for c in caches])
        gc.collect()
        more = mx.get_active_memory()-before-sum(c.nbytes for c in caches)
    assert more<25_000*LAYERS

@every
@pytest.mark.parametrize('w', [24, 200])
def test_sliding_window(method, name, w):
    "A band over what the list reads"
    caches, xs, at = linked(method, name, sliding_window=w), layers(T+361), 0
    for n in (50,1,T-51,1,1,40,1,18,299,1):
        ys, at = cut(xs, slice(at, at+n)), at+n
        for c,y in zip(caches, ys):
            handles = c.update_and_fetch(y.k, y.v)
            k, v = (o+0 for o in handles)
            first = c.first
            out = mx.fast.scaled_dot_product_attention(y.q, *handles, scale=SCALE, mask='causal' if n>1 else None)
            q, j = mx.arange(at-n, at)[:,None], mx.arange(first, at)[None]
            assert close(out, attention(y.q, k, v, (j<=q) & (j>q-w))), at
    again = [type(c).from_state(c.state) for c in caches]
    assert same(step_all(again, layers(1, seed=8)), step_all(caches, layers(1, seed=8)))
