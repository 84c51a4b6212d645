import os

import torch

# The Triton kernels run on CPU tensors this way; it must be said before triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
