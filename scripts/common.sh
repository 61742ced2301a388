# Sourced by the other scripts: where things are on this system. Leaves the shell in the root of the tree.
# shellcheck shell=bash disable=SC2034
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

system=$(uname -s)
machine=$(uname -m)
[ "$machine" = arm64 ] && machine=aarch64

if [ "$system" = Darwin ]; then
    jobs=$(sysctl -n hw.ncpu)
    if command -v brew >/dev/null; then
        homebrew=$(brew --prefix)
        # Homebrew keeps these two out of the ordinary places.
        export PKG_CONFIG_PATH="$homebrew/opt/openssl@3/lib/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}"
        llvm=$homebrew/opt/llvm@19/bin/
        llvm_suffix=
    fi
else
    jobs=$(nproc)
    llvm=
    llvm_suffix=-19
fi

# The LLVM 19 tool of this name: clang, clang-format, clang-tidy.
llvm_tool() { printf '%s%s%s\n' "${llvm-}" "$1" "${llvm_suffix-}"; }

# C and C++ files of the tree.
source_files() { find include src tests bench fuzz python -name '*.[ch]' -o -name '*.cpp' | sort; }
