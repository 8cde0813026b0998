"""Infer a model from GPU counters or a trace, and check a claim about one. No torch.

    evidence/   the kernels of a recording, their order, and the position of each in the model
    facts.py    the facts that a single kernel can provide; families/ has a reader for each kernel family
    shape.py    the sizes of a model and of its run, and the GEMM and tensor sizes that follow from them
    solve/      all sizes that fit, ranked, and which of them are certain: `stepscope recover`
    claims/     predictions from a claim, compared with every kernel: `stepscope verify`
    reports/    signed reports, their keys and hashes
    study/      which counter depends on which size: `stepscope recover --study`

`families` turns kernels into facts and `evidence` turns their order into layers. Neither depends on `solve` or
`claims`. `claims` uses `solve` for the sizes that are not claimed.
"""
