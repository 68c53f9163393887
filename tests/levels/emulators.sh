#!/bin/sh
# Get what emulates other processors: qemu, a cross compiler for aarch64, and Debian's Python for aarch64, unpacked into
# .cache/aarch64. For Debian and Ubuntu, as root; the tests of tests/levels say what is missing and are skipped.
set -eu
cd "$(dirname "$0")/../.."
apt-get install -y --no-install-recommends qemu-user-static g++-aarch64-linux-gnu
[ -x .cache/aarch64/usr/bin/python3 ] && exit
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if ! dpkg --print-foreign-architectures | grep -qx arm64; then
  trap 'rm -rf "$folder"; dpkg --remove-architecture arm64' EXIT
  dpkg --add-architecture arm64
  apt-get update
fi
python=$(apt-cache depends python3-minimal:arm64 | sed -n 's/.*Depends: \(python3\.[0-9]*-minimal\).*/\1/p' | head -n 1)
python=${python%-minimal}
(
  cd "$folder"
  for package in "$python-minimal" "lib$python-minimal" "lib$python-stdlib" libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 libffi8 libssl3; do
    apt-get download "$package:arm64"
  done
  for package in *.deb; do dpkg -x "$package" root; done
)
ln -sf "$python" "$folder/root/usr/bin/python3"
mkdir -p .cache
mv "$folder/root" .cache/aarch64
