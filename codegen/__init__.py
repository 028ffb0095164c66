"""What kernels exist, and how one becomes source and then an object file.  No GPU and no torch needed."""
