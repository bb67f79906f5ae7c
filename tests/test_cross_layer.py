"Linked caches of methods whose kernels read what another layer stored: in the emulator as with array operations."
import copy
import mlx.core as mx
import numpy as np
import pytest
from emulated import emulated
from test_attention_kernels import distance, error
from veloxquant_mlx.engine.hook import install
from veloxquant_mlx.engine.registry import methods
from veloxquant_mlx.kernels.runtime import use_backend

@pytest.fixture(autouse=True)
def hook(): install() # other tests of the process may have taken it away

def case(method, dim=64, value_dim=None, n_rep=2, B=1, n=2, **fields): return dict(method=method, dim=dim, value_dim=value_dim or dim, n_rep=n_rep, B=B, n=n, fields=fields)
xquant = lambda R=32, **kw: case('xquant', residual_length=R, **kw)
minicache = lambda g=.3, **kw: case('minicache', minicache_start_frac=0., minicache_retention_threshold=g, **kw)
CASES = [xquant(), xquant(xquant_residual_bits=0, n_rep=4, value_dim=128), xquant(dim=96, xquant_base_bits=3, xquant_residual_bits=8, B=2, n=3, xquant_group_size=3),
    xquant(xquant_max_ctx=96), xquant(R=48, dim=80, value_dim=48, xquant_group_quant_size=16, xquant_base_bits=1, xquant_residual_bits=1, xquant_max_ctx=144), xquant(dim=128, xquant_max_ctx=64, xquant_residual_bits=0, xquant_base_bits=4),
    minicache(), minicache(.9, dim=128, n_rep=4, value_dim=80), minicache(.6, dim=80, value_dim=24, B=2, n=3, minicache_group_size=3, minicache_max_ctx=70), minicache(0., dim=256, value_dim=64)]
name = lambda c: '-'.join([c['method'], f"D{c['dim']}", *(f'{k.split("_")[-2][:9]}{v}' for k,v in c['fields'].items())])
each = pytest.mark.parametrize('c', CASES, ids=name)

def draw(c, n, seed, dtype=mx.float16, H=2):
    "q, k, v of n tokens for each layer; layers resemble each other"
    out, first = [], None
    for i in range(c['n']):
        rng = np.random.default_rng(seed+50*i)
        q, k, v = (rng.standard_normal((c['B'], h, n, d)) for h,d in ((H*c['n_rep'], c['dim']), (H, c['dim']), (H, c['value_dim'])))
        k += np.random.default_rng(5).standard_normal((1, H, 1, c['dim']))
        first = first or (k, v)
        if i: k, v = (.9*a+.4*b for a,b in zip(first, (k, v)))
        out.append([mx.array(x.astype(np.float32)).astype(dtype) for x in (q, k, v)])
    return out

class Pair:
    "A list with kernels and one without, fed alike"
    def __init__(self, c, layout='cuda', **kw):
        self.c, self.backend = c, emulated(layout)
        make = lambda **more: methods()[c['method']].cache_class.linked(c['n'], head_dim=c['dim'], fused_sdpa=True, **c['fields']|kw|more)
        with use_backend(self.backend): self.fused = make()
        self.plain = make(use_metal_kernels=False)
    def __call__(self, xs, mask='made', sinks=None):
        for a,b,(q,k,v) in zip(self.fused, self.plain, xs):
            m = ('causal' if q.shape[2]>1 else None) if isinstance(mask, str) else mask
            run = lambda o, q=q, k=k, v=v, m=m: mx.fast.scaled_dot_product_attention(q, *o.update_and_fetch(k, v), scale=q.shape[-1]**-.5, mask=m, sinks=sinks)
            with use_backend(self.backend): got = run(a); mx.eval(got)
            want = run(b)
            assert a.no_kernel is None and got.dtype==want.dtype and got.shape==want.shape
            bound = 8e-3 if q.dtype==mx.bfloat16 else 2e-3
            assert distance(got, want)<bound and error(got, want)<3*bound
        for a,b in zip(self.fused, self.plain):
            with use_backend(self.backend): mine = a.payload()
            assert all(mx.array_equal(x, y).item() for x,y in zip(mine, b.payload(), strict=True))
    def trim(self, n):
        for l in self.fused, self.plain:
            with use_backend(self.backend): assert {o.trim(n) for o in l}=={n}

@pytest.mark.filterwarnings('ignore:.*codes of their own')
@each
def test_same_outputs(c):
    "A prompt, chunks, steps, calls of a few tokens, past the horizon, and what is left after `trim`"
    p = Pair(c, ('cuda', 'metal')[CASES.index(c)%2])
    for i,n in enumerate([90, 37, 60, 1, 4, 1]): p(draw(c, n, i))
    p.trim(5)
    p(draw(c, 1, 10))
    p.trim(31)
    for i,n in enumerate([1, 3, 1]): p(draw(c, n, 20+i))

@pytest.mark.filterwarnings('ignore:.*codes of their own')
@pytest.mark.parametrize('c', CASES[::3], ids=name)
def test_masks_sinks_dtypes_windows(c):
    c = c|dict(B=2)
    p, sinks = Pair(c), mx.array([2., -1, 0, 1])
    for i,n in enumerate([140, 1, 4]):
        T = p.fused[0].offset+n
        visible = (mx.arange(T)>=mx.array([9, 0])[:, None])[:, None, None]
        if n>1: visible = visible & (mx.arange(T)<=mx.arange(T-n, T)[:, None])
        p(draw(c, n, i), visible, sinks if i else None)
    p = Pair(c)
    for i,n in enumerate([140, 1]): p(draw(c, n, i, mx.bfloat16))
    p = Pair(c, sliding_window=24)
    for i,n in enumerate([260, 41, 1, 30, 1, 290, 4, 1]): p(draw(c, n, i))
    assert all(o.first for o in p.fused)

@pytest.mark.parametrize('c', [CASES[0], CASES[6]], ids=name)
def test_state(c):
    "Saved, restored and copied lists go on in the same way"
    xs = [draw(c, n, i) for i,n in enumerate([141, 1, 3, 1])]
    run = lambda l, x: [mx.fast.scaled_dot_product_attention(q, *o.update_and_fetch(k, v), scale=.1, mask='causal' if q.shape[2]>1 else None) for o,(q,k,v) in zip(l, x)]
    with use_backend(emulated()):
        a = methods()[c['method']].cache_class.linked(c['n'], head_dim=c['dim'], **c['fields'])
        for x in xs[:2]: run(a, x)
        lists = a, [type(o).from_state([mx.array(s) for s in o.state]) for o in a], copy.deepcopy(a)
        for x in xs[2:]:
            outs = [run(l, x) for l in lists]
            assert all((p==q).all().item() for o in outs[1:] for p,q in zip(o, outs[0]))
        assert all(o.no_kernel is None for l in lists for o in l)
