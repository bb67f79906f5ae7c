"""KV-cache compression methods for MLX language models

Modules:

- `veloxquant_mlx.cache.base`: One configuration for every method, one cache for a layer, one list of caches for a model.
- `veloxquant_mlx.cache.options`: Every method's options dataclass in one place.
- `veloxquant_mlx.cli`: `veloxquant`: choose a configuration, generate with it, compare it.
- `veloxquant_mlx.config.allocate`: Measure how much each layer's cache matters, and give the layers that matter more bits of a common budget.
- `veloxquant_mlx.config.select`: From the shape of a workload to a method, a code width and a group size, by three rules.
- `veloxquant_mlx.core.abstractions`: What a quantizer, a standalone cache, a store of artifacts and an observer promise.
- `veloxquant_mlx.core.artifacts`: Rotations, codebooks, bases and other tables that a method computed ahead of time, in files that cannot be mistaken for each other.
- `veloxquant_mlx.core.fields`: One declaration per option: default, meaning and legal range feed validation, CLI help, sliders and the docs table.
- `veloxquant_mlx.core.observers`: What a cache stored, how long it took, how far it is from the truth: told to whoever asks.
- `veloxquant_mlx.core.sample`: Queries, keys and values of a real model, in the package.
- `veloxquant_mlx.core.settings`: The fields of a configuration that belong to no single method.
- `veloxquant_mlx.dashboards.explorer`: Pick a method, turn its options, and see what it does to a real piece of attention.
- `veloxquant_mlx.dashboards.panel`: Sliders, text and pictures that all dashboards share.
- `veloxquant_mlx.dashboards.schedule`: Give every layer its own width, see what that should cost, and measure what it does.
- `veloxquant_mlx.dashboards.selector`: Move the workload about and watch which method is chosen, why, and what it would weigh.
- `veloxquant_mlx.engine.attention`: Attention in plain array operations: the path without a GPU, and what kernels are compared with.
- `veloxquant_mlx.engine.base`: mlx-lm's whole cache protocol, for one layer, so that a method only says what it stores.
- `veloxquant_mlx.engine.calibrate`: What a method computes about a model ahead of time: how it is collected, to which weights it belongs, how layers get their part.
- `veloxquant_mlx.engine.codecs`: The two group layouts that many methods share: per token and per channel.
- `veloxquant_mlx.engine.crosslayer`: Caches of one list that know each other: groups of neighbouring layers, and what they share.
- `veloxquant_mlx.engine.evict_trial`: What every eviction notebook needs: rows by a recipe, prompts and steps, and a picture of what survived.
- `veloxquant_mlx.engine.evicting`: The family base of methods that forget tokens: when rows go, and where the others lie.
- `veloxquant_mlx.engine.hook`: One wrapper around MLX's attention function lets every cache see the model's real queries.
- `veloxquant_mlx.engine.latent`: The family base of low-rank methods: rows in a basis of another width, read a tile at a time.
- `veloxquant_mlx.engine.layer_config`: What one layer's cache needs to know, small enough to travel with it.
- `veloxquant_mlx.engine.layers`: Which entries of a model's cache list can be compressed, and what was done to each.
- `veloxquant_mlx.engine.probes`: The true attention probabilities of a few queries, for methods that ask which tokens the model looks at.
- `veloxquant_mlx.engine.quantized`: The family base of the quantizers: two streams, and attention over them.
- `veloxquant_mlx.engine.registry`: The one list of methods.
- `veloxquant_mlx.engine.segments`: The family base of methods that compress when a prompt ends: segments of compressed tokens, then exact ones.
- `veloxquant_mlx.engine.split`: A few channels that are much larger than the others get a codec, a rotation and a scale of their own.
- `veloxquant_mlx.engine.standalone`: Five methods are caches of their own: one head, one sequence, answered without a model.
- `veloxquant_mlx.engine.stored`: The form of a cache that nobody reads: entropy coded, checked, in a file or out of the way.
- `veloxquant_mlx.engine.stream`: One side of a cache, keys or values: exact first tokens, packed blocks, exact tail.
- `veloxquant_mlx.engine.trial`: What every method's notebook needs to show its cache at work.
- `veloxquant_mlx.evaluate.compare`: One row a cache: quality, needle, bytes, time.
- `veloxquant_mlx.evaluate.corpus`: The reference text of all measurements: part of Python itself.
- `veloxquant_mlx.evaluate.memory`: How many bytes a cache really holds, and how many an uncompressed one would.
- `veloxquant_mlx.evaluate.needle`: Can the model still find one sentence in a long text?
- `veloxquant_mlx.evaluate.quality`: What a cache costs: the likelihood of a text's continuation.
- `veloxquant_mlx.evaluate.speed`: A decode step with a cache, against the plain cache in the same run.
- `veloxquant_mlx.kernels.attention`: One flash-decoding kernel over packed codes; a method adds a few lines that decode them.
- `veloxquant_mlx.kernels.encode`: Scale, code and pack new rows in one pass; decode packed rows.
- `veloxquant_mlx.kernels.evict`: What tokens received, without the matrix of all queries and keys; and which one goes.
- `veloxquant_mlx.kernels.gather`: Copy chosen rows of every head.
- `veloxquant_mlx.kernels.latent`: Keys that are stored as coordinates in a basis of their own: scored by a kernel without ever being written out.
- `veloxquant_mlx.kernels.runtime`: One kernel text for Metal, CUDA and a CPU emulator.
- `veloxquant_mlx.kernels.snippets`: The few lines that turn packed codes into numbers inside a kernel.
- `veloxquant_mlx.methods.a2ats`: Every row stays exact; short codes of the keys choose which rows a decode step reads.
- `veloxquant_mlx.methods.adakv`: A layer has one budget of bits; on every block of tokens the heads that lose most get most of it.
- `veloxquant_mlx.methods.age_tiered`: Precision by token age: the newest groups at eight bits, middle-aged ones at four, old ones at two.
- `veloxquant_mlx.methods.amc`: No token is dropped: salient ones stay exact, the middle keeps a third of its dimensions in 8 bits, the rest a sixteenth in 4 bits.
- `veloxquant_mlx.methods.anchorkv`: A few exact anchor tokens; every other token is an anchor times a number, and a rest where it matters.
- `veloxquant_mlx.methods.cachegen`: Each token as a coarse difference to the first of its group; entropy coded with a table per channel when it is stored.
- `veloxquant_mlx.methods.cam`: The token that leaves gives its value, in parts, to those that follow it.
- `veloxquant_mlx.methods.chunkkv`: Tokens stay or go in whole chunks of neighbours, for all heads of a layer, or of several layers, alike.
- `veloxquant_mlx.methods.curdkv`: When a prompt ends, a row stays for the sake of its key *and* its value.
- `veloxquant_mlx.methods.gear`: Quantize, then repair: a low-rank matrix for the error, a sparse one for the outliers.
- `veloxquant_mlx.methods.h2o`: Each head keeps the tokens that collected the most attention so far, and the newest ones.
- `veloxquant_mlx.methods.keyformer`: As H2O, with noise and a temperature inside the softmax that is summed: no token goes because of one unlucky reading.
- `veloxquant_mlx.methods.kitty`: Two-bit keys with a few channels at four bits: on each page of tokens, those of the largest magnitude.
- `veloxquant_mlx.methods.kivi`: Two-bit keys and values: keys per channel, values per token, the newest tokens exact.
- `veloxquant_mlx.methods.kivi_sink`: Two-bit keys and values, but the few tokens that attract most of the attention stay exact and out of the statistics.
- `veloxquant_mlx.methods.knorm`: Keys with a small norm are the ones that attention goes to: each head keeps those.
- `veloxquant_mlx.methods.kvquant`: Keys before RoPE, levels fitted to the data, one percent of outliers kept apart.
- `veloxquant_mlx.methods.kvtc`: JPEG for KV caches: one basis, bit widths by measured error, DEFLATE on top; first and newest tokens untouched.
- `veloxquant_mlx.methods.kvzip`: The model repeats its context once; pairs that the repetition looked at stay, for every question to come.
- `veloxquant_mlx.methods.minicache`: In the deeper half of a model two neighbouring layers keep one direction for each token, and their own lengths.
- `veloxquant_mlx.methods.morphkv`: A constant number of rows: the newest tokens, and those that the newest queries look at, chosen anew at every step.
- `veloxquant_mlx.methods.nestedkv`: A key stays if it is unlike the average of all keys, of its block, and of the keys just before it; heads compete for room.
- `veloxquant_mlx.methods.nsnquant`: Rows made to look standard normal, and one codebook for every model.
- `veloxquant_mlx.methods.palu`: Keys and values of a group of heads as one short latent; keys are rebuilt on the fly, values never are.
- `veloxquant_mlx.methods.polar`: Directions instead of coordinates: after a random rotation the angles of a vector need no scales.
- `veloxquant_mlx.methods.pyramidkv`: Low layers keep more tokens than high ones, in even steps, at the same total.
- `veloxquant_mlx.methods.qfilters`: One fixed direction per head ranks all keys: the one along which its queries drift.
- `veloxquant_mlx.methods.qjl`: One bit a projection: the signs of a random sketch of each key, and its length.
- `veloxquant_mlx.methods.rocketkv`: A coarse eviction when the prompt ends, and behind it steps that read only the rows they need.
- `veloxquant_mlx.methods.skvq`: Channels with like ranges share a scale, ranges are clipped by a searched factor, and the newest tokens stay exact.
- `veloxquant_mlx.methods.snapkv`: The last queries of a prompt vote for its tokens; each head keeps the winners with their neighbours.
- `veloxquant_mlx.methods.spectral`: The data's own axes instead of a random rotation: bits where the energy is.
- `veloxquant_mlx.methods.squeeze`: Layers whose attention changes little give most of their budget to the others.
- `veloxquant_mlx.methods.streaming_llm`: The first few tokens and a window of the newest ones, with positions counted inside the cache.
- `veloxquant_mlx.methods.svdq`: Keys in the singular vectors of their own prompt: many bits for the first few, none for the last.
- `veloxquant_mlx.methods.tova`: When the cache is full, the token goes at which the newest query looks least.
- `veloxquant_mlx.methods.turboquant_mse`: One codebook for every vector: a random rotation gives all coordinates the same known law.
- `veloxquant_mlx.methods.turboquant_prod`: One bit less for the codes; the bit that is saved holds the sign of what they leave out.
- `veloxquant_mlx.methods.turboquant_rvq`: Rotate, then two stages of scalar codes per coordinate; the default method.
- `veloxquant_mlx.methods.vecinfer`: Small pieces of smoothed, rotated keys and of raw values, each an index into a codebook.
- `veloxquant_mlx.methods.xkv`: One token basis for neighbouring layers: what their caches have in common is stored once.
- `veloxquant_mlx.methods.xquant`: Neighbouring layers share one array of codes; each keeps its own scales, with end points moved inwards.
- `veloxquant_mlx.methods.zipcache`: Tokens that queries really look at have four bits, all others two; a value's parameters cost next to nothing.
- `veloxquant_mlx.models.gguf`: A GGUF file becomes an mlx-lm model, exactly.
- `veloxquant_mlx.models.gguf_tokenizer`: The tokenizer that a GGUF file carries, token for token.
- `veloxquant_mlx.models.load`: One call for a hub id, a folder, a GGUF file, or the small embedded model.
- `veloxquant_mlx.ops.affine`: Round-to-nearest codes with one scale and one zero point per group, along channels or along tokens.
- `veloxquant_mlx.ops.cast`: Numbers that stay finite in half precision.
- `veloxquant_mlx.ops.codebook`: The best few levels for numbers of a known law, or for numbers at hand.
- `veloxquant_mlx.ops.entropy`: Lossless coding of quantized caches for storage: range ANS with static tables, DEFLATE, and a file format that notices damage.
- `veloxquant_mlx.ops.kmeans`: A codebook of vectors, fitted to samples.
- `veloxquant_mlx.ops.lowrank`: A few rounds of power iteration give the best rank-r part of a block, without an SVD.
- `veloxquant_mlx.ops.packing`: Codes of any width lie in `uint32` words, never one code a byte.
- `veloxquant_mlx.ops.rope`: Rotary position embedding, applied and taken back exactly.
- `veloxquant_mlx.ops.rotation`: Orthogonal maps that spread a vector's energy evenly over its coordinates.
- `veloxquant_mlx.ops.select`: Attention mass of stored tokens, and selections that are the same on every machine.
- `veloxquant_mlx.ops.sketch`: A random projection of which only the signs are kept still tells inner products, on average.
- `veloxquant_mlx.ops.sparse`: A few exact numbers added to decoded rows, and the layout in which they are counted.
- `veloxquant_mlx.ops.topk`: Exactly k winners, equal values decided by position."""

__version__ = "0.1.0"

from importlib import import_module as _import

# Public names and the modules they live in: loaded on first use, so that the import itself stays cheap and touches nothing in mlx
_exports = {name: module for module, names in {
    'cache.base': 'KVCacheConfig KVCacheFactory KVCacheBuilder STANDALONE_METHODS',
    'config.allocate': 'allocate_bits allocate_bits_continuous calibrate_layer_sensitivities fit_distortion layer_schedule measure_sensitivity',
    'config.select': 'select_kv_cache_config SelectionResult WorkloadSpec HardwareInfo detect_hardware_info',
    'core.errors': 'QuantizerConfigError',
    'engine.layers': 'describe',
    'models.load': 'load_model ModelLoadError'}.items() for name in names.split()}

__all__ = list(_exports)

def __getattr__(name):
    if name not in _exports: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import(f'{__name__}.{_exports[name]}'), name)

def __dir__(): return sorted({*globals(), *_exports})
