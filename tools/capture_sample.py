"""Capture the real attention sample that ships with the package: `python tools/capture_sample.py`

One float32 forward pass of the embedded SmolLM2-135M-Instruct over the first 512 tokens of the longest topic of `pydoc_data.topics`;
queries, keys and values are taken where they reach attention (after RoPE) and stored in float16. The text changes with the
version of Python, so the version is part of the file's metadata; the committed file was made with 3.11."""
import json, platform
from pathlib import Path
import mlx.core as mx
from veloxquant_mlx.evaluate.corpus import corpus_tokens
from veloxquant_mlx.models.load import embedded_model_path, load_model

layers,n_heads,n_tokens = [13,14],2,512                                    # neighbours, so that cross-layer methods can use them too
dest = Path(__file__).parent.parent/'veloxquant_mlx/data/attention_sample.safetensors'

def attention_inputs(model, tokens):
    "Queries, keys, values and scale of every attention call of one forward pass, in layer order"
    calls,sdpa = [],mx.fast.scaled_dot_product_attention
    def record(q, k, v, *, scale, **kwargs):
        calls.append((q, k, v, scale))
        return sdpa(q, k, v, scale=scale, **kwargs)
    mx.fast.scaled_dot_product_attention = record
    try: mx.eval(model(mx.array(tokens)[None]))
    finally: mx.fast.scaled_dot_product_attention = sdpa
    return calls

def main():
    mx.set_default_device(mx.cpu)
    model,tokenizer = load_model(dtype=mx.float32)
    calls = attention_inputs(model, corpus_tokens(tokenizer, n_tokens))
    group = calls[0][0].shape[1]//calls[0][1].shape[1]
    take = lambda i, n: mx.stack([calls[l][i][0,:n] for l in layers]).astype(mx.float16)
    arrays = dict(queries=take(0, n_heads*group), keys=take(1, n_heads), values=take(2, n_heads))
    meta = dict(model='HuggingFaceTB/SmolLM2-135M-Instruct', source=embedded_model_path().name, licence='Apache-2.0',
        text=f"Python {platform.python_version()}, pydoc_data.topics, longest topic, first {n_tokens} tokens",
        layers=json.dumps(layers), heads=json.dumps(list(range(n_heads))), rope_base=str(model.args.rope_theta), scale=str(calls[0][3]))
    mx.save_safetensors(str(dest), arrays, meta)
    print(f"{dest.name}: {dest.stat().st_size/1e6:.2f} MB, {({k: v.shape for k,v in arrays.items()})}")

if __name__=='__main__': main()
