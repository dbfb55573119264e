"""`make demo`: this machine's build of the kernel, put into a Gemma 3 model and compared with torch alone."""

import os

# Read when huggingface_hub and transformers are imported, which the modules of this package do. Nothing is downloaded
# here, and these make sure of it; the weights are random and the kernel comes from build/.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
