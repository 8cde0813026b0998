"""Fake CUDA tensors on any machine."""

import os

_enabled = False


def enable() -> None:
    global _enabled
    if _enabled:
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from stepscope.plan.fake_cuda import extension, vtables

    (extension if not extension.why_not() else vtables).install()
    _enabled = True
