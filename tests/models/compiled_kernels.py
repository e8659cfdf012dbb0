"""Compiles Triton kernels for a GPU that this machine need not have."""

POINTERS = ("qkv", "output", "d_output", "d_qkv")


def compiled_for_hopper(kernel, constants):
    """The machine code of a kernel that reads bf16, for the generation of the H100 and H200."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {
        name: "*bf16" if name in POINTERS else "i32" if name.startswith("n") else "fp32" for name in kernel.arg_names
    }
    signature = {**kinds, **dict.fromkeys(constants, "constexpr")}
    by_place = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(kernel, signature, by_place), target=GPUTarget("cuda", 90, 32)).asm["cubin"]
