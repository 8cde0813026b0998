"""The way to fake CUDA without a compiler: through ctypes, by the layout of PyTorch's objects.

PyTorch itself replaces a CUDA guard that counts no devices by one that does nothing
(`torch._C._ensureCUDADeviceGuardSet`). A CPU build has no guard to replace, so it gets an object whose every method
returns 0. The hooks, a static object, get a copy of their table of virtual functions, in which two entries return
constants.

The functions are a few bytes of machine code, not callbacks into Python: autograd's threads and C++'s destructors call
them, also when Python has ended. For the same reason, the memory comes from the system and is never returned.

The positions of the two entries are those of the versions in `VERSIONS`; nothing else is tried.
"""

import ctypes
import mmap
import platform
from pathlib import Path

import torch

VERSIONS = ("2.11", "2.12", "2.13")
IS_BUILT, HAS_PRIMARY_CONTEXT = 2, 4  # in the table of `at::AcceleratorHooksInterface`, after two destructors
_CUDA = 1  # c10::DeviceType::CUDA
_NUM_GUARDS, _NUM_SLOTS = 32, 96  # at least as many as there are; entries that are not replaced are copied
_HEADER = 2  # words before the first entry: the offset to the top, and the type
_RETURN = {  # machine code of functions that return 0 and 1
    "x86_64": (bytes.fromhex("31c0c3"), bytes.fromhex("b801000000c3")),
    "aarch64": (bytes.fromhex("00008052c0035fd6"), bytes.fromhex("20008052c0035fd6")),
}
_WORD = ctypes.sizeof(ctypes.c_void_p)
_GUARD_TABLE, _GUARD, _HOOKS_TABLE = 0, 1024, 2048  # positions in the data page
_PAGE = 4096


def why_not() -> str:
    """Why the layout is unknown here; empty if it is known."""
    if platform.system() != "Linux" or platform.machine() not in _RETURN:
        return f"the layout of PyTorch's objects is unknown on {platform.system()} {platform.machine()}"
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in VERSIONS:
        return f"the layout of PyTorch's objects is known for versions {', '.join(VERSIONS)}, not for {version}"
    return ""


def install() -> None:
    """Replace the guard, and two entries of the hooks. OSError if PyTorch's libraries lack a name."""
    folder = Path(torch.__file__).parent / "lib"
    core, cpu = (ctypes.CDLL(str(folder / name)) for name in ("libc10.so", "libtorch_cpu.so"))
    code, data = _map_page(), _map_page()
    zero, one = _write_functions(code)
    guards = (ctypes.c_void_p * _NUM_GUARDS).in_dll(core, "_ZN3c104impl26device_guard_impl_registryE")
    if not guards[_CUDA]:
        _words(data + _GUARD_TABLE, 64)[:] = [zero] * 64
        _words(data + _GUARD, 1)[:] = [data + _GUARD_TABLE]
        guards[_CUDA] = data + _GUARD
    torch._C._ensureCUDADeviceGuardSet()
    if guards[_CUDA] == data + _GUARD:
        raise OSError("PyTorch did not replace the device guard")
    find_hooks = cpu["_ZN2at6detail12getCUDAHooksEv"]
    find_hooks.restype = ctypes.c_void_p
    pointer = ctypes.c_void_p.from_address(find_hooks())
    assert pointer.value is not None, "PyTorch has no CUDA hooks"
    header = _HEADER * _WORD
    table = _words(data + _HOOKS_TABLE, _HEADER + _NUM_SLOTS)
    table[:] = list(_words(pointer.value - header, _HEADER + _NUM_SLOTS))
    table[_HEADER + IS_BUILT], table[_HEADER + HAS_PRIMARY_CONTEXT] = one, zero
    pointer.value = data + _HOOKS_TABLE + header


def _words(address: int, count: int) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * count).from_address(address)


def _map_page() -> int:
    """The address of a page of memory, which stays until the process ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address: int | None = libc.mmap(None, _PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap failed")
    assert address is not None
    return address


def _write_functions(page: int) -> tuple[int, int]:
    """Write the functions that return 0 and 1 to a page, make it executable, and return their addresses."""
    zero, one = _RETURN[platform.machine()]
    ctypes.memmove(page, zero, len(zero))
    ctypes.memmove(page + 64, one, len(one))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(page, _PAGE, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "this system does not allow code in memory")
    return page, page + 64
