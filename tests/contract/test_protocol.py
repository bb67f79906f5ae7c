"What mlx-lm finds or must not find on a cache, what observers are told, and what memory holds between calls."
import copy, gc, weakref
import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import KVCache
from cases import *
from veloxquant_mlx.core.abstractions import CacheEvent, QuantizationObserver
from veloxquant_mlx.engine.base import CompressedCache, Hidden
from veloxquant_mlx.engine.hook import KVHandle

each, few, one = over(CASES), over(FEW), over(ONE)

# --- members

ABSENT = 'to_quantized', 'merge', 'bits', 'group_size', '__len__', '__bool__' # each switches something in mlx-lm

def members(cls): return sorted(set(dir(cls))-set(dir(object))-{'__dict__','__module__','__weakref__','__annotations__','__firstlineno__','__static_attributes__'})

def inherited(cls):
    "Members of mlx-lm's classes that act on ours, because no class of ours has its own"
    ours = cls.__mro__[:cls.__mro__.index(KVCache)]
    return [o for o in members(KVCache) if not any(o in vars(c) for c in ours)]

def test_no_member_of_kvcache_is_inherited(monkeypatch):
    "A member that a later mlx-lm adds must be overridden or hidden before it acts on us: this test names it"
    assert inherited(CompressedCache)==[]
    monkeypatch.setattr(KVCache, 'brand_new', lambda self: 1, raising=False)
    assert inherited(CompressedCache)==['brand_new']

@one
def test_absent_members(case):
    for c in case.create(), filled(case):
        assert c and isinstance(c, KVCache) and isinstance(c, CompressedCache)
        for o in ABSENT: assert not hasattr(c, o) and not hasattr(type(c), o), o

@one
def test_no_method_brings_a_member_back(case):
    "Nor gets to the stock implementation of one"
    cls = SERVABLE[case.method].cache_class
    assert inherited(cls)==[]
    for o in members(KVCache): assert isinstance(next(vars(c)[o] for c in cls.__mro__ if o in vars(c)), Hidden) or getattr(cls, o)!=getattr(KVCache, o) or o in ('step','meta_state'), o

def test_caches_are_found_by_name():
    "`load_prompt_cache` looks their classes up in mlx-lm's module"
    names = [m.cache_class.__name__ for m in SERVABLE.values()]
    assert len(set(names))==len(names)
    for m in SERVABLE.values(): assert getattr(mlx_cache, m.cache_class.__name__) is m.cache_class and m.cache_class.method==m.name

@one
def test_values_of_members(case):
    c = case.create()
    assert c.meta_state=='' and c.offset==c.size()==0 and c.empty() is True and c.model_nbytes==0
    for n in 1,3:
        before = c.offset
        c.expect_prompt(n)
        handles = c.update_and_fetch(*list(step(n=n))[1:])
        assert all(type(h) is KVHandle and h.owner is c and h.shape==(1,H,c.offset,D) for h in handles) and [h.kind for h in handles]==['k','v']
        mx.eval(mx.fast.scaled_dot_product_attention(step(n=n).q, *handles, scale=SCALE))
        assert c.offset==before+n and c.empty() is False and type(c.offset) is type(c.nbytes) is int
        if not case.traits.evicts: assert c.size()==c.offset
        assert c.fp16_nbytes==4*H*c.offset*D

@one
@pytest.mark.parametrize('n', [0,9])
def test_masks_are_those_of_the_stock_cache(case, n):
    ref, c = KVCache(), case.create()
    if n:
        ref.update_and_fetch(*list(rows(n))[1:])
        feed(c, rows(n))
    for N in 1,5:
        for window in None,4,50:
            for array in False,True:
                a, b = c.make_mask(N, return_array=array, window_size=window), ref.make_mask(N, return_array=array, window_size=window)
                assert mx.array_equal(a, b) if isinstance(b, mx.array) else a==b
        assert c.make_mask(N) is None if N==1 else c.make_mask(N)=='causal'

# --- observers

class Log(QuantizationObserver):
    def __init__(self): self.events = []
    def on_event(self, event): self.events.append(event)

@few
def test_observers_are_told_of_every_update(case):
    "Once each, after the update, and of nothing else"
    a, b = Log(), Log()
    c = case.create(observers=[a, b])
    for n in 40,1,60,1: feed(c, rows(n))
    c.keys_and_values(), c.state, c.trim(0), c.nbytes
    with pytest.raises(ValueError): c.update_and_fetch(mx.zeros((1,H,0,D)), mx.zeros((1,H,0,D)))
    assert [e.shape for e in a.events]==[(1,H,n,D) for n in (40,1,60,1)] and [e.offset for e in a.events]==[40,41,101,102]
    assert all(type(e) is CacheEvent and e.method==case.method and e.seconds>=0 and e.nbytes>0 for e in a.events) and a.events==b.events
    if not case.traits.evicts and not c.needs_queries: assert a.events[-1].nbytes==c.nbytes # else the call's attention has packed since

@one
def test_observers_are_shared_by_copies_and_not_saved(case):
    log = Log()
    c = case.create(observers=[log])
    feed(c, rows(5))
    feed(copy.deepcopy(c), rows(5))
    assert len(log.events)==2
    again = type(c).from_state(c.state)
    feed(again, rows(5))
    assert len(log.events)==2

@one
def test_observers_change_nothing(case):
    assert stored(filled(case, observers=[Log()]))==stored(filled(case))

# --- memory between calls

def grown(f):
    "Bytes that `f()` leaves allocated beyond what it returns, the second time: by then tables that all caches share are there"
    for _ in range(2):
        kept = None
        gc.collect()
        mx.clear_cache() # else larger buffers that earlier tests left are handed out again, and count in full
        before = mx.get_active_memory()
        kept = f()
        if kept: mx.eval(kept.state) # what the last call decided is carried out at the next one, or here
        gc.collect()
        more = mx.get_active_memory()-before-(kept.nbytes if kept else 0)
    return more

def prefill(case, chunk, refs):
    "A cache after 900 tokens, of which only outputs are evaluated, as mlx-lm does; weak references to all arrays that it was given"
    c = case.create()
    for i in range(0, 900, chunk):
        x = rows(min(chunk, 900-i), seed=i)
        handles = c.update_and_fetch(x.k, x.v)
        mx.eval(mx.fast.scaled_dot_product_attention(x.q, *handles, scale=SCALE, mask='causal'))
        refs.extend(weakref.ref(o) for o in (x.k, x.v, *handles))
    return c

@pytest.mark.parametrize('case,chunk', [(c,900) for c in FEW]+[(c,256) for c in ONE], ids=str)
def test_no_full_size_rows_after_a_prefill(case, chunk):
    "The process holds what the cache says, and none of the arrays it was given"
    refs = []
    assert grown(lambda: prefill(case, chunk, refs))<H*900*D*4/3 # a third of one side
    assert all(r() is None for r in refs)

@few
def test_decoding_piles_nothing_up(case):
    "50 steps of which only the output is evaluated"
    x = rows(200)
    def decode():
        c = filled(case, x[:150])
        for i in range(150, 200): mx.eval(call(c, x[i:i+1]))
        return c
    assert grown(decode)<25_000

@few
def test_a_cache_frees_what_it_held(case):
    refs = []
    def live():
        c = filled(case, rows(500))
        feed(c, rows(5))
        refs.append(weakref.ref(c))
    assert grown(live)<10_000 and not any(r() for r in refs)
