"The measurements on the embedded model, with mlx-lm's own caches."
import mlx.core as mx, mlx.nn as nn, pytest
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache
from veloxquant_mlx.evaluate.compare import compare
from veloxquant_mlx.evaluate.corpus import corpus_tokens
from veloxquant_mlx.evaluate.memory import held_bytes, memory_report
from veloxquant_mlx.evaluate.needle import needle_found, needle_prompt
from veloxquant_mlx.evaluate.quality import continuation_nll
from veloxquant_mlx.evaluate.speed import decode_ratio
from veloxquant_mlx.models.load import load_model

@pytest.fixture(scope='module')
def loaded(): return load_model()

@pytest.fixture(scope='module')
def tokens(loaded): return corpus_tokens(loaded[1], 192)

def quantized(model, bits): return [QuantizedKVCache(group_size=32, bits=bits) for _ in model.layers]

def test_nll_is_that_of_one_forward_pass(loaded, tokens):
    model,x = loaded[0],mx.array(tokens)
    expected = nn.losses.cross_entropy(model(x[None,:-1])[0,127:].astype(mx.float32), x[128:], reduction='mean').item()
    res = continuation_nll(model, tokens, make_prompt_cache(model), prefill=128, chunk=24, progress=False)
    assert res.tokens==64 and abs(res.nll-expected)<1e-3
    one = continuation_nll(model, tokens[:136], make_prompt_cache(model), prefill=128, chunk=1, progress=False)
    all_ = continuation_nll(model, tokens[:136], make_prompt_cache(model), prefill=128, chunk=8, progress=False)
    assert abs(one.nll-all_.nll)<1e-3

def test_fewer_bits_cost_more(loaded, tokens):
    model = loaded[0]
    res = {b: continuation_nll(model, tokens, quantized(model, b), prefill=128, chunk=16, reference=make_prompt_cache(model), progress=False) for b in (8,2)}
    assert res[8].kl<.01 and res[8].flips<.05
    assert res[2].kl>.3 and res[2].flips>.2 and res[2].nll>res[8].nll+.3

def test_held_bytes(loaded, tokens):
    model = loaded[0]
    caches = {n: make(model) for n,make in dict(plain=make_prompt_cache, q4=lambda m: quantized(m, 4)).items()}
    for c in caches.values():
        mx.eval(model(mx.array(tokens[:64])[None], cache=c), [e.state for e in c])
    itemsize = caches['plain'][0].keys.dtype.size
    assert held_bytes(caches['plain'])==30*2*3*256*64*itemsize and memory_report(caches['plain']).fp16==30*2*3*64*64*2
    assert memory_report(caches['q4']).fraction==(4 + 2*itemsize*8/32)/16*4  # buffers of 256 tokens for 64

@pytest.mark.parametrize('depth', [.2,.8])
def test_needle(loaded, depth):
    res = needle_found(*loaded, context=400, depth=depth)
    assert res.found and res.answer.startswith('4817') and abs(res.context-400)<4

def test_a_cache_that_forgets_loses_the_needle(loaded):
    model = loaded[0]
    assert not needle_found(*loaded, lambda: [RotatingKVCache(max_size=64, keep=4) for _ in model.layers], context=300).found

def test_needle_prompt(loaded):
    text = loaded[1].decode(needle_prompt(loaded[1], 400, .5, code='90125'))
    assert text.endswith('<|im_start|>assistant\nThe secret access code of the archive is') and text.count('90125')==1
    assert .3<text.index('90125')/len(text)<.7

def test_nothing_on_stdout_and_bars_can_be_off(loaded, tokens, capsys):
    continuation_nll(loaded[0], tokens[:40], make_prompt_cache(loaded[0]), prefill=8, chunk=8, progress=False)
    decode_ratio(loaded[0], tokens[:40], context=32, steps=2, warmup=1, progress=False)
    needle_found(*loaded, context=100, progress=False)
    assert capsys.readouterr()==('','')

def test_compare(loaded):
    rows = list(compare(*loaded, {'8 bits': lambda: quantized(loaded[0], 8)}, tokens=80, prefill=64, chunk=16, needle_context=160, speed_context=32, steps=2, progress=False))
    assert [r.name for r in rows]==['plain','8 bits'] and all(r.needle for r in rows)
    assert rows[0].nll_change==0 and abs(rows[1].nll_change)<.02 and rows[1].fraction<rows[0].fraction and rows[1].step_ratio>0
