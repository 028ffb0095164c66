"""Copy a vector through shared memory: a small kernel that follows the contract of rendered kernels."""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

THREADS = 128


@cute.kernel
def copy_kernel(src: cute.Tensor, dst: cute.Tensor, length: Int32, num_ctas: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    staged = SmemAllocator().allocate_tensor(Float32, cute.make_layout(THREADS), byte_alignment=128)
    for index in cutlass.range(block * THREADS + thread, length, num_ctas * THREADS):
        staged[thread] = src[index]
        dst[index] = staged[thread]


@cute.jit
def launch(src: cute.Tensor, dst: cute.Tensor, num_ctas: Int32, stream: CUstream):
    copy_kernel(src, dst, cute.size(src), num_ctas).launch(grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)


def fake_arguments():
    length = cute.sym_int()
    src = make_fake_compact_tensor(Float32, (length,), stride_order=(0,), assumed_align=4)
    dst = make_fake_compact_tensor(Float32, (length,), stride_order=(0,), assumed_align=4)
    return src, dst, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)
