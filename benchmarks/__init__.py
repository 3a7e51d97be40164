"""What every benchmark measures on: layers of Llama-like models of 7 to 123 billion weights, as (rows, cols)."""

EIGHT = ((4096, 4096), (11008, 4096), (4096, 11008), (8192, 8192), (12288, 12288), (28672, 8192), (8192, 28672),
         (36864, 12288))  # fmt: skip
