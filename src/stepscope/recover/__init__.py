"""Recover a model from what a GPU reported, and verify what somebody claims of one. No torch.

    evidence/   what a recording shows: its kernels, the order in which they ran, where each of them stands
    facts.py    what single kernels can say, and families/, one table of readers that make them say it
    shape.py    the sizes of a model and of its run, and of the products and tensors that follow from them
    solve/      all integers that fit, ranked, and said with what is certain: `stepscope recover`
    claims/     predictions from a claim, held against every kernel: `stepscope verify`
    reports/    signed reports, their keys and hashes
    study/      which counter follows which size: `stepscope recover --study`

`families` turns kernels into facts, `evidence` turns their order into layers; neither knows what is asked. `claims`
asks `solve` for the sizes that nobody claimed.
"""
