"""Measure the methods that forget tokens on one model: what a text loses, which needles are found, how long a decode step takes.

    python bench/eviction.py                                  # every such method; about an hour on two CPU cores
    python bench/eviction.py --methods snapkv h2o --only needle --json needle.json

Quality: the change of the negative log-likelihood of 128 tokens, read one at a time behind a prompt of 896. Needle: a code in a prompt
of 1,500 tokens, the question at its end. Steps: two layers of the model's shape with random weights, behind a prompt of 8,192 tokens,
in turns with the plain cache; so a ratio is that of a whole step of the model without its output layer.
"""
import argparse, dataclasses, json, sys
import mlx.core as mx, mlx_lm
import numpy as np
import veloxquant_mlx
from tqdm import tqdm
from mlx_lm.models.cache import make_prompt_cache
from veloxquant_mlx.cache.base import KVCacheBuilder
from veloxquant_mlx.config.select import config_of
from veloxquant_mlx.core.errors import QuantizerConfigError
from veloxquant_mlx.engine.evicting import EvictingCache
from veloxquant_mlx.engine.registry import get_method, methods
from veloxquant_mlx.evaluate.corpus import corpus_tokens
from veloxquant_mlx.evaluate.memory import memory_report
from veloxquant_mlx.evaluate.needle import needle_found
from veloxquant_mlx.evaluate.quality import continuation_nll
from veloxquant_mlx.evaluate.speed import decode_ratio
from veloxquant_mlx.models.load import load_model

PARTS = 'quality', 'needle', 'steps'
NAMES = [n for n,m in methods().items() if issubclass(m.cache_class, EvictingCache)]

def budget_of(method:str, budget:int, n:int)->dict: # tokens that stay of n
    "The fields that set a method's budget"
    if method=='streaming_llm': return dict(stream_window_size=budget-get_method(method).options().stream_n_sink)
    if method=='rocketkv': return dict(rocketkv_compression_ratio=n/budget)
    return {get_method(method).cache_class.budget_field: budget}

class Bench:
    "One model, one budget, a row for each method"
    def __init__(self, args):
        self.args, self.rows = args, []
        self.model, self.tokenizer = load_model(args.model) if args.model else load_model()
    def maker(self, model, method, budget, n):
        if method is None: return lambda: make_prompt_cache(model)
        fields = budget_of(method, budget, n)
        return lambda: KVCacheBuilder.for_model(model, config_of(method, **fields))
    def quality(self, method):
        a, cache = self.args, self.maker(self.model, method, self.args.budget, self.args.tokens)()
        found = continuation_nll(self.model, corpus_tokens(self.tokenizer, a.tokens), cache, a.tokens-a.tokens//8, chunk=1)
        size = memory_report(cache)
        return dict(nll=found.nll, bytes=size.used/size.fp16)
    def needle(self, method):
        make = self.maker(self.model, method, self.args.budget, self.args.context)
        return dict(needle={d: needle_found(self.model, self.tokenizer, make, self.args.context, d).found for d in self.args.depths})
    def steps(self, method):
        a = self.args
        make, V = self.maker(self.layers, method, a.step_budget, a.step_context), self.layers.args.vocab_size
        tokens = np.random.default_rng(0).integers(0, V, a.step_context+1).tolist()
        r = decode_ratio(self.layers, tokens, make, a.step_context, a.steps)
        return dict(step_ms=r.seconds*1e3, faster=r.plain_seconds/r.seconds)
    def run(self):
        a = self.args
        mx.random.seed(0)
        fields = dict(num_hidden_layers=2, vocab_size=256)
        if getattr(self.model.args, 'layer_types', None): fields['layer_types'] = self.model.args.layer_types[:2]
        self.layers = type(self.model)(dataclasses.replace(self.model.args, **fields))
        with tqdm(total=(len(a.methods)+1)*len(a.only), unit='part', leave=False) as bar:
            for method in [None, *a.methods]:
                row = dict(method=method or 'plain')
                self.rows.append(row)
                for part in a.only:
                    bar.set_description(f'{row["method"]}, {part}')
                    try: row |= getattr(self, part)(method)
                    except (QuantizerConfigError, ValueError) as e: row[f'{part}_refused'] = str(e)
                    bar.update()
                if 'nll' in row: row['change'] = row['nll']-self.rows[0]['nll']
                if a.json: self.save()
    def save(self):
        about = dict(veloxquant_mlx=veloxquant_mlx.__version__, mlx=mx.__version__, mlx_lm=mlx_lm.__version__, device=str(mx.default_device()))
        with open(self.args.json, 'w') as f: json.dump(about|{k: v for k,v in vars(self.args).items() if k!='json'}|dict(rows=self.rows), f, indent=1)

def table(rows, only, depths):
    "The rows in Markdown"
    head = ['method']+['change', 'bytes']*('quality' in only)+[f'at {d:g}' for d in depths]*('needle' in only)+['step']*('steps' in only)
    def cells(r):
        yield r['method']
        if 'quality' in only: yield from (f"{r['change']:+.3f}", f"{r['bytes']:.1%}") if 'change' in r else ('refused',)*2
        if 'needle' in only: yield from ('yes' if o else 'no' for o in r['needle'].values()) if 'needle' in r else ('refused',)*len(depths)
        if 'steps' in only: yield f"{r['faster']:.2f} times" if 'faster' in r else 'refused'
    lines = [head, ['---']+['---:']*(len(head)-1), *map(cells, rows)]
    return '\n'.join(f"| {' | '.join(o)} |" for o in lines)

def main(args=None):
    p = argparse.ArgumentParser(description='Measure the methods that forget tokens on one model.')
    p.add_argument('--model', metavar='PATH', help='default: the embedded model')
    p.add_argument('--methods', nargs='+', choices=NAMES, default=NAMES)
    p.add_argument('--only', nargs='+', choices=PARTS, default=PARTS)
    p.add_argument('--budget', type=int, default=256, help='tokens that stay, for quality and needle')
    p.add_argument('--tokens', type=int, default=1024, help='length of the text')
    p.add_argument('--context', type=int, default=1500, help="tokens of the needle's prompt")
    p.add_argument('--depths', nargs='+', type=float, default=[.1, .3, .5, .7, .9])
    p.add_argument('--step-context', type=int, default=8192)
    p.add_argument('--step-budget', type=int, default=512)
    p.add_argument('--steps', type=int, default=20)
    p.add_argument('--json', metavar='FILE', help='write all figures there, after each method')
    bench = Bench(p.parse_args(args))
    bench.run()
    print(table(bench.rows, bench.args.only, bench.args.depths))
    return 0

if __name__=='__main__': sys.exit(main())
