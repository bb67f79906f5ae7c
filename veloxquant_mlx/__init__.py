"""KV-cache compression methods for MLX language models

Modules:

- `veloxquant_mlx.core.abstractions`: What a quantizer, a standalone cache, a store of artifacts and an observer promise.
- `veloxquant_mlx.core.fields`: One declaration per option: default, meaning and legal range feed validation, CLI help, sliders and the docs table.
- `veloxquant_mlx.core.settings`: The fields of a configuration that belong to no single method.
- `veloxquant_mlx.ops.affine`: Round-to-nearest codes with one scale and one zero point per group, along channels or along tokens.
- `veloxquant_mlx.ops.codebook`: The best few levels for numbers of a known law, or for numbers at hand.
- `veloxquant_mlx.ops.lowrank`: A few rounds of power iteration give the best rank-r part of a block, without an SVD.
- `veloxquant_mlx.ops.packing`: Codes of any width lie in `uint32` words, never one code a byte.
- `veloxquant_mlx.ops.rope`: Rotary position embedding, applied and taken back exactly.
- `veloxquant_mlx.ops.rotation`: Orthogonal maps that spread a vector's energy evenly over its coordinates.
- `veloxquant_mlx.ops.topk`: Exactly k winners, equal values decided by position."""

__version__ = "0.1.0"
