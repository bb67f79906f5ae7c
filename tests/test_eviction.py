"What all methods that forget tokens have in common: the same rows for every chunking, bounded bytes, memory that is really free, the prompt clock, padding."
import copy, gc, sys
from pathlib import Path
import mlx.core as mx
import pytest
sys.path.insert(0, str(Path(__file__).parent/'contract'))
from cases import *
from veloxquant_mlx.engine.evicting import EvictingCache
from veloxquant_mlx.engine.hook import install

EVICTING = [c for c in FEW if c.traits.evicts]
each = pytest.mark.parametrize('case', EVICTING, ids=str)

@pytest.fixture(autouse=True)
def hook(): install() # other tests of the process may have taken it away

def kept(c):
    "Real positions that are stored, one sorted list for each batch row and KV head (or for all heads)"
    return [[[p for p in g if p>=0] for g in b] for b in c.positions.tolist()]

def filled(case, x, chunks=None, left_padding=None, **kw):
    "A cache after a prompt, whether the method needs its queries or not"
    c = case.create(head_dim=x.k.shape[-1], **kw)
    if left_padding: c.left_padding = left_padding
    outs = feed(c, x, chunks)
    return c if left_padding is None else (c, mx.concatenate(outs, axis=2))

def steps(c, x):
    for i in range(x.n): mx.eval(call(c, x[i:i+1]))
    return c

def test_the_family():
    assert EVICTING and all(issubclass(SERVABLE[c.method].cache_class, EvictingCache) for c in EVICTING)

# --- which rows

@each
def test_chunking_does_not_change_which_rows_stay(case):
    x = rows(600)
    once = filled(case, x)
    assert once.size()<600 and once.offset==600
    for chunks in (1,)*600, chunks_of(600, 7), chunks_of(600, 512), (599,1): assert kept(filled(case, x, chunks))==kept(once), chunks[0]

@each
def test_a_prompt_that_nobody_announced_ends_with_its_first_single_token(case):
    x = rows(600)
    c = case.create()
    for a,b in (0,400),(400,599),(599,600): mx.eval(call(c, x[a:b]))
    assert kept(c)==kept(filled(case, x))

@each
def test_safe_rows(case):
    "Sinks and newest rows are there after a prompt and after every step, and a forgotten token never comes back"
    x, c = rows(700), case.create()
    feed(c, x[:600])
    before = kept(c)
    for t in range(600, 700):
        mx.eval(call(c, x[t:t+1]))
        now = kept(c)
        for old,new in zip(before[0], now[0]):
            assert set(new)<=set(old)|{t} and new==sorted(set(new))
            assert new[:c.n_sink]==list(range(c.n_sink)) and new[len(new)-c.n_recent:]==list(range(t+1-c.n_recent, t+1))
        before = now

@each
def test_rows_of_a_batch_choose_for_themselves(case):
    x = rows(400, B=2)
    both, alone = steps(filled(case, x[:360]), x[360:]), [steps(filled(case, x.batch(i)[:360]), x.batch(i)[360:]) for i in (0,1)]
    assert kept(both)==[kept(c)[0] for c in alone]

@pytest.mark.parametrize('case', [c for c in EVICTING if c.traits.averages_heads], ids=str)
def test_query_heads_of_a_group_count_together(case):
    "Each query head twice, beside itself: the same rows; not where heads draw noise or add logits"
    x = rows(400)
    y = Rows(mx.repeat(x.q, 2, axis=1), x.k, x.v)
    assert kept(steps(filled(case, x[:360]), x[360:]))==kept(steps(filled(case, y[:360]), y[360:]))

@each
def test_left_padding(case):
    "A padded row keeps and reads what its tokens do alone; padding is dropped first"
    x, pad = rows(300, B=2), 25
    y = Rows(*(mx.concatenate([o[:1], mx.pad(o[1:,:,:300-pad], [(0,0),(0,0),(pad,0),(0,0)])]) for o in x))
    both, outs = filled(case, y[:260], (130,130), left_padding=[0,pad])
    alone = [filled(case, x.batch(0)[:260]), filled(case, x.batch(1)[:260-pad])]
    assert close(outs[1:,:,pad:], causal(x.batch(1)[:260-pad])) or not case.traits.exact_prompt or not case.traits.reads_rows
    assert kept(both)==[kept(c)[0] for c in alone]
    for t in range(260, 300):
        out = call(both, y[t:t+1])
        for i,shift in (0,0),(1,pad): assert close(out[i:i+1], call(alone[i], x.batch(i)[t-shift:t-shift+1])) or case.traits.draws_rows
    assert kept(both)==[kept(c)[0] for c in alone]

@each
def test_the_next_turn(case):
    "A call of several tokens opens a prompt: nothing is dropped until it ends (but where a method drops in every call), then the rows are chosen among old and new ones"
    x = rows(700)
    c = steps(filled(case, x[:400]), x[400:420])
    before, n = kept(c), c.size()
    mx.eval(call(c, x[420:520]))
    c.expect_prompt(60) if case.traits.prompt_end else None
    if case.traits.prompt_end: assert c.size()==n+100
    for i in range(520, 580): mx.eval(call(c, x[i:i+1]))
    again = steps(filled(case, x[:400]), x[400:420])
    again.expect_prompt(160)
    mx.eval(call(again, x[420:580]))
    assert kept(again)==kept(c) and c.size()<n+160
    assert all(set(new)<=set(old)|set(range(420, 580)) for old,new in zip(before[0], kept(c)[0]))

@pytest.mark.parametrize('case', [c for c in EVICTING if SERVABLE[c.method].cache_class.backend_field], ids=str)
def test_paths_choose_alike(case):
    x, field = rows(400), SERVABLE[case.method].cache_class.backend_field
    results = [kept(steps(filled(case, x[:360], **{field: o}), x[360:])) for o in ('auto','mlx','reference')]
    assert results[0]==results[1]==results[2]
    with pytest.raises(RuntimeError, match=f"{field}='cuda'"): case.create(**{field: 'cuda'})
    with pytest.raises(ValueError, match=f"{field}.*'metal'.*use_metal_kernels"): case.create(use_metal_kernels=False, **{field: 'metal'})

# --- how much

@each
def test_bytes_are_bounded_for_a_thousand_steps(case):
    "By the method's formula, an empty row and, where rows behind the prompt stay, those and the room for 256 more"
    x = rows(600)
    c = filled(case, x)
    C, row = c.size(), max(1.3*c.kept_bytes, 1.05*c.used_nbytes)/c.size()
    most = c.formula_nbytes(c.offset)*(C+1)/C+64*H
    assert c.nbytes<=most+(0 if c.bounded else 256*row)
    for i in range(1000): mx.eval(call(c, x[i%600:i%600+1]))
    assert c.offset==1600 and c.size()==(C if c.bounded else C+1000)
    assert c.nbytes<=most+(0 if c.bounded else 1256*row)
    assert c.used_nbytes==pytest.approx(c.formula_nbytes(1600), rel=.03)

@each
def test_memory_is_released(case):
    "Not only a smaller slice of it: what the process holds after the prompt is what the cache says"
    def active():
        gc.collect(); mx.synchronize(); mx.clear_cache()
        return mx.get_active_memory()
    x = rows(2000, D=64)
    mx.eval(*x)
    for _ in range(2): # the first time fills tables that all caches share
        before, c = active(), case.create(head_dim=64)
        c.expect_prompt(x.n)
        for a in range(0, 2000, 500): mx.eval(call(c, x[a:a+500]))
        assert c.size()<2000
        held = active()-before
        used_, dense = c.nbytes, 2*H*2000*64*4
        del c
    assert abs(held-used_)<16384*6 and used_<.6*dense

@each
def test_capacity_bounds_an_open_prompt(case):
    "Rows are chosen early; what is left at its end is the budget's"
    x = rows(600)
    C = filled(case, x).size()
    c = case.create(capacity=C+40)
    c.expect_prompt(600)
    for a in range(0, 600, 100):
        mx.eval(call(c, x[a:a+100]))
        assert c.size()<=C+40
    assert c.size()<=C and c.offset==600
    with pytest.raises(ValueError, match='^capacity must be >= '): case.create(capacity=1)

# --- protocol

@each
def test_kept_positions_survive_files_and_copies(case):
    x = rows(500)
    c = steps(filled(case, x[:400]), x[400:420])
    others = [copy.deepcopy(c), type(c).from_state(c.state)]
    for o in c, *others: steps(o, x[420:])
    assert kept(others[0])==kept(others[1])==kept(c)

@each
def test_queries_are_needed_or_not(case):
    c, x = case.create(), rows(400)
    c.expect_prompt(400)
    c.update_and_fetch(x.k, x.v)
    if c.needs_queries:
        with pytest.raises(RuntimeError, match=f'{case.method}: attention hook bypassed by'): c.update_and_fetch(x.k[:,:,:1], x.v[:,:,:1])
    else:
        for i in range(3): c.update_and_fetch(x.k[:,:,i:i+1], x.v[:,:,i:i+1])
        assert c.offset==403 and c.size()<400

@each
def test_a_prompt_shorter_than_the_padding_of_a_row(case):
    "Of one row there is nothing yet when the prompt of the others ends"
    c, x = case.create(), rows(40, B=2)
    c.left_padding = [0,9]
    feed(c, x[:4])
    outs = [call(c, x[i:i+1]) for i in range(4, 40)]
    mx.eval(outs, c.state)
    assert c.offset==40 and mx.isfinite(mx.concatenate(outs, axis=2)).all()
