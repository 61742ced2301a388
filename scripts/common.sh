# Sourced by the other scripts. Defines the platform and the locations of tools, and changes to the root of the tree.
# shellcheck shell=bash disable=SC2034
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

system=$(uname -s)
machine=$(uname -m)
[ "$machine" = arm64 ] && machine=aarch64

if [ "$system" = Darwin ]; then
    jobs=$(sysctl -n hw.ncpu)
    if command -v brew >/dev/null; then
        homebrew=$(brew --prefix)
        # Homebrew does not link openssl@3 and llvm@19 into its prefix.
        export PKG_CONFIG_PATH="$homebrew/opt/openssl@3/lib/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}"
        llvm=$homebrew/opt/llvm@19/bin/
        llvm_suffix=
    fi
else
    jobs=$(nproc)
    llvm=
    llvm_suffix=-19
fi

# Prints the command of an LLVM 19 tool such as clang, clang-format or clang-tidy.
llvm_tool() { printf '%s%s%s\n' "${llvm-}" "$1" "${llvm_suffix-}"; }

# Prints the C and C++ files of the tree.
source_files() { find include src tests bench fuzz python -name '*.[ch]' -o -name '*.cpp' | sort; }
