"""Tools of the repository: they build, check, measure and demonstrate the kernel and are never shipped with it."""
