"""`matmul`: GEMM in the shape of cuBLASLt's, column-major, with its epilogues."""
