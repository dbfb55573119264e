"""The local variant builder: what kernel-builder makes of build.toml, without nix.

`python -m tools.build` compiles exactly the files that build.toml lists and writes build/<variant>/ in the layout that
the `kernels` loader reads. A variant appears whole and checked, or not at all.

    config, capabilities        what to build: build.toml, the CUDA architectures a toolkit can compile for
    toolchain, cuda             what to build with: the C++ compiler, the CUDA toolkit, and what identifies each
    stage, units                the private copy of the sources and one compiler command for each of them
    objects, runner             the object cache and the parallel, interruptible execution
    link, variant, provenance   the library, the directory around it and its metadata
    pipeline                    the order of all that
    check                       what must hold of any variant directory (`python -m tools.build.check`)
"""

# Written into the provenance of what this builder makes.
BUILDER = "geglu-tools-build 1"
