"""Memory of a CUDA GPU by the driver alone, or by what stands in for it: neither PyTorch nor CUDA's runtime is needed."""

import ctypes

_driver = ctypes.CDLL("libcuda.so.1")


def _call(name, *arguments):
    result = getattr(_driver, name)(*arguments)
    if result != 0:
        raise RuntimeError(f"{name}: {result}")


_call("cuInit", 0)


class Memory:
    """Memory on a device, whose primary context is made current on this thread, as in programs that use a GPU."""

    def __init__(self, size, device=0):
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call("cuCtxSetCurrent", context)
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.address, self.size, self.device = address.value, size, device

    def write(self, data):
        data = bytes(data)
        _call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.address), data, ctypes.c_size_t(len(data)))

    def read(self, at=0, size=None):
        size = self.size - at if size is None else size
        out = ctypes.create_string_buffer(size)
        _call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(self.address + at), ctypes.c_size_t(size))
        return out.raw
