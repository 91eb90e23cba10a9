"""C++, compiled when the file is imported."""

import ctypes
import pathlib
import subprocess
import tempfile

import torch

ORIGINAL = "ema"
SOURCE = """
extern "C" void average(const float* x, float* y, long batch, long steps, long width) {
    for (long b = 0; b < batch; ++b)
        for (long t = 0; t < steps; ++t)
            for (long d = 0; d < width; ++d) {
                long at = (b * steps + t) * width + d;
                y[at] = (t ? 0.9f * y[at - width] : 0.0f) + x[at];
            }
}
"""

folder = pathlib.Path(tempfile.mkdtemp())
(folder / "average.cpp").write_text(SOURCE)
subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", folder / "average.so", folder / "average.cpp"], check=True)
average = ctypes.CDLL(str(folder / "average.so")).average
average.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_long]


class ModelNew(torch.nn.Module):
    def forward(self, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        average(x.data_ptr(), y.data_ptr(), *x.shape)
        return y
