"Low-rank methods: when decompositions run, and what a decode step builds."
import gc
import mlx.core as mx
import numpy as np
import pytest
from veloxquant_mlx.engine.hook import install
from veloxquant_mlx.engine.registry import methods
from veloxquant_mlx.ops.rope import RopeParams

@pytest.fixture(autouse=True)
def hook(): install()

@pytest.fixture
def decompositions(monkeypatch):
    "Names of all decompositions that run, and whether they were asked to run on the CPU"
    found = []
    def counted(module, name):
        f = getattr(module, name)
        def g(*args, **kw):
            found.append((name, module is np.linalg or kw.get('stream')==mx.cpu))
            return f(*args, **kw)
        monkeypatch.setattr(module, name, g)
    for name in ('eigh', 'eigvalsh', 'eig', 'eigvals', 'svd', 'qr', 'lu', 'cholesky', 'pinv', 'inv'):
        for module in (mx.linalg, np.linalg):
            if hasattr(module, name): counted(module, name)
    return found

METHODS = [k for k,m in methods().items() if m.family=='low_rank']
AT_PROMPT_END = [k for k in METHODS if k!='kvtc'] # kvtc waits for tokens enough, in decode steps too
FIELDS = {}

def rows(n, H=2, n_rep=3, D=64, seed=0): return [mx.array(np.random.default_rng(seed+i).standard_normal((1, h, n, D)).astype(np.float32)) for i,h in enumerate((H*n_rep, H, H))]
def cache(method, rope=True, **kw):
    c = methods()[method].cache_class.of(head_dim=64, **FIELDS.get(method, {})|kw)
    c.bind(0, 64, RopeParams(64) if rope else None, False, False, 'a model')
    return c
def call(c, x): return mx.fast.scaled_dot_product_attention(x[0], *c.update_and_fetch(*x[1:]), scale=.125, mask=c.make_mask(x[0].shape[2]))
def steps(c, n, seed=5):
    for i in range(n): mx.eval(call(c, rows(1, seed=seed+3*i)))

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('method', AT_PROMPT_END)
def test_decode_steps_decompose_nothing(method, decompositions):
    "At the end of a prompt once, on the CPU; never again, in a later turn neither"
    c = cache(method)
    c.expect_prompt(301)
    mx.eval(call(c, rows(300)))
    assert not decompositions
    steps(c, 1)
    c.commit()
    n = len(decompositions)
    assert 0<n<=4 and all(cpu for _,cpu in decompositions)
    steps(c, 200)
    assert len(decompositions)==n
    mx.eval(call(c, rows(90)), c.state)
    steps(c, 1)
    c.commit()
    steps(c, 70)
    assert len(decompositions)==n and c.keys_stream.n_packed>500

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('rope', [True, False])
@pytest.mark.parametrize('method', METHODS)
def test_a_step_builds_no_full_copy(method, rope):
    "Beyond what is held, a step at 8,000 tokens takes little more memory than one at 3,000: tiles one after the other, and exact values at most"
    peaks = []
    for n in (3000, 8000):
        c, x = cache(method, rope), rows(n, H=1, n_rep=1)
        c.expect_prompt(n)
        for a in range(0, n, 1000): mx.eval(call(c, [o[:, :, a:a+1000] for o in x]), c.state)
        del x
        y = rows(1, H=1, n_rep=1)
        mx.eval(call(c, y)) # whoever grows has grown
        gc.collect()
        base = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(call(c, y))
        peaks.append(mx.get_peak_memory()-base)
    assert peaks[1]-peaks[0]<5000*64*4*1.2, peaks
