#!/usr/bin/env python3
"""Compiles kernel.cu to kernel.ptx with NVRTC, which needs neither a GPU nor CUDA's toolkit:

    pip install nvidia-cuda-nvrtc-cu12==12.2.140
    python3 make_ptx.py [path of libnvrtc.so.12]
"""

import ctypes
import pathlib
import re
import sys
import zlib

FOLDER = pathlib.Path(__file__).parent
OPTIONS = [b"--gpu-architecture=compute_60", b"--std=c++14"]
# The oldest PTX version with all instructions that are used; ptxas fails if it is too old.
VERSION = ".version 6.0"
HEAD = """//
// Made from kernel.cu with CRC-32 {:08x} by make_ptx.py: compiled by NVRTC for compute_60, with .version lowered to the
// oldest that has all instructions used, which ptxas has checked. After a change of kernel.cu, run make_ptx.py again.
//
"""


def library():
    if len(sys.argv) > 1:
        path = pathlib.Path(sys.argv[1])
    else:
        import nvidia.cuda_nvrtc

        path = pathlib.Path(nvidia.cuda_nvrtc.__path__[0]) / "lib/libnvrtc.so.12"
    for part in path.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def text(nvrtc, program, what):
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, room)
    return room.value.decode()


def compiled(source):
    nvrtc, program = library(), ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    if nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options) != 0:
        sys.exit(text(nvrtc, program, "ProgramLog"))
    return text(nvrtc, program, "PTX")


source = (FOLDER / "kernel.cu").read_bytes()
ptx = compiled(source)
# Removes the compiler's banner, and tables that it adds and nothing uses.
lines = ptx[ptx.index(".version") :].splitlines(True)
ptx = "".join(line for line in lines if "nv6target" not in line and "has been demoted" not in line)
ptx = re.sub(r"\.version .*", VERSION, ptx, count=1)
ptx = re.sub(r"\n{3,}", "\n\n", ptx).strip() + "\n"
(FOLDER / "kernel.ptx").write_text(HEAD.format(zlib.crc32(source)) + ptx)
