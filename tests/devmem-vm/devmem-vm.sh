#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Run a test of Linux devmem TCP in a VM with a software NIC. No hardware; KVM where it works. See README.md.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: devmem-vm.sh [options] [PROGRAM [ARG...]]
  PROGRAM        static ELF binary or #!/bin/sh script, run as root in the VM once per MTU;
                 default: the self-test of the kernel interface (selftest.c)
  -m MTU[,MTU]   MTUs to run at (default 1500,9000)
  -n             two namespaces: dm0 10.9.0.1 here, dm1 10.9.0.2 in that of process $PEER_PID
  -f FILE        also put FILE into the root directory of the VM (repeatable)
  -o DIR         what PROGRAM leaves in /out of the VM comes back to DIR; meant for a few MB
  -t SECONDS     limit for each run of PROGRAM (default 120)
  -c CPUS, -g MEM   size of the VM (default 2, 1G)
  -b             build what a VM needs, and boot none
  -u             look for a newer kernel package than the cached one
exit status: PROGRAM's (the last failing one); 77 skipped, something is missing here;
             99 kernel warning; 125 the VM died or could not be built
USAGE
}

mtus=1500,9000 netns=0 seconds=120 cpus=2 mem=1G update=0 build_only=0 files=() out=
while getopts m:nf:o:t:c:g:buh option; do
    case $option in
        m) mtus=$OPTARG ;;
        n) netns=1 ;;
        f) files+=("$OPTARG") ;;
        o) out=$OPTARG ;;
        t) seconds=$OPTARG ;;
        c) cpus=$OPTARG ;;
        g) mem=$OPTARG ;;
        b) build_only=1 ;;
        u) update=1 ;;
        h) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))

here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/ferrywire-devmem-vm
suite=${DEVMEM_VM_SUITE:-trixie}
kernel_suite=${DEVMEM_VM_KERNEL_SUITE:-$suite-backports}
root=$cache/$suite
log=$cache/build.log

skip() { echo "SKIPPED: devmem VM needs $*" >&2; exit 77; }
fail() { echo "devmem VM: $*; the log is build.log in the cache directory" >&2; tail -n 5 "$log" >&2; exit 125; }

# Module interfaces change: a build failure on an untested kernel counts as a missing requirement, not as a defect.
fail_on_known_kernel() {
    local kernel
    kernel=$(cat "$root/kernel/.complete")
    case $kernel in 7.[0-3].*) fail "$@" ;; esac
    tail -n 5 "$log" >&2
    skip "a kernel up to 7.3 ($kernel: $*)"
}

[ "$(uname -m)" = x86_64 ] || skip "an x86-64 host"
command -v qemu-system-x86_64 >/dev/null || skip "qemu-system-x86_64 (apt-get install qemu-system-x86)"

# Run a command inside the build root, with its own mounts.
inside() { unshare -m sh -c 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"' "$root" "$@" >>"$log" 2>&1; }

build_root() {
    [ -e "$root/.complete" ] && return
    [ "$(id -u)" = 0 ] || skip "root for its first run (debootstrap)"
    command -v debootstrap >/dev/null || skip "debootstrap (apt-get install debootstrap)"
    rm -rf "$root"
    debootstrap --variant=minbase \
        --include=make,gcc,libc6-dev,linux-libc-dev,binutils,libelf1t64,kmod,xz-utils,busybox-static,ca-certificates \
        "$suite" "$root" ${DEVMEM_VM_MIRROR:+"$DEVMEM_VM_MIRROR"} >>"$log" 2>&1 ||
        skip "a Debian mirror (debootstrap $suite failed)"
    sed "s/ $suite / $kernel_suite /" "$root/etc/apt/sources.list" >"$root/etc/apt/sources.list.d/kernel.list"
    touch "$root/.complete"
}

# The newest cloud kernel of the suite: image and headers, once.
fetch_kernel() {
    [ $update = 0 ] && [ -e "$root/kernel/.complete" ] && return
    [ "$(id -u)" = 0 ] || skip "root to install a kernel package into its build root"
    # An earlier run may have been ended in the middle of an installation.
    inside dpkg --configure -a || fail "dpkg is left interrupted"
    inside apt-get ${DEVMEM_VM_APT_OPTIONS:-} update -qq || skip "package lists of $kernel_suite"
    local version
    version=$(chroot "$root" apt-cache depends "linux-headers-cloud-amd64/$kernel_suite" 2>>"$log" |
        sed -n 's/.*Depends: linux-headers-\(.*-cloud-amd64\).*/\1/p' | head -n 1)
    [ -n "$version" ] || skip "a cloud kernel in $kernel_suite"
    [ "$(cat "$root/kernel/.complete" 2>/dev/null)" = "$version" ] && return
    rm -rf "$root/kernel"
    mkdir "$root/kernel"
    inside apt-get install -y -qq --no-install-recommends -t "$kernel_suite" gcc binutils "linux-headers-$version" ||
        skip "kernel headers $version"
    # The image's package name differs between releases.
    inside sh -c "cd /kernel && for p in linux-image-$version linux-binary-$version linux-modules-$version; do
        apt-get download -qq \$p; done; for d in *.deb; do dpkg-deb -x \$d . && rm \$d; done"
    local image
    image=$(find "$root/kernel" -name 'vmlinuz*' -type f | head -n 1)
    [ -n "$image" ] || skip "the kernel image $version"
    mv "$image" "$root/kernel/vmlinuz"
    echo "$version" >"$root/kernel/.complete"
}

# dmnic.ko and the self-test, again whenever a source or the kernel changed.
build_sources() {
    local stamp
    stamp=$(cat "$root/kernel/.complete" "$here/dmnic.c" "$here/Kbuild" "$here/selftest.c" | sha256sum)
    [ "$(cat "$root/build/.stamp" 2>/dev/null)" = "$stamp" ] && return
    [ "$(id -u)" = 0 ] || skip "root to build its module"
    rm -rf "$root/build"
    mkdir "$root/build"
    cp "$here/dmnic.c" "$here/Kbuild" "$here/selftest.c" "$root/build/"
    # No BTF: it needs the kernel's debug image.
    inside make -s -C "/usr/src/linux-headers-$(cat "$root/kernel/.complete")" M=/build \
        CONFIG_DEBUG_INFO_BTF_MODULES= modules || fail_on_known_kernel "dmnic does not build for this kernel"
    inside strip -g /build/dmnic.ko || fail "strip failed"
    inside gcc -O2 -Wall -static -o /build/selftest /build/selftest.c || fail "the self-test does not build"
    echo "$stamp" >"$root/build/.stamp"
}

# Whether KVM is there and really boots a kernel: nested or trimmed ones may hang. Asked once per boot of this host.
kvm_works() {
    case ${DEVMEM_VM_ACCEL:-auto} in kvm) return 0 ;; tcg) return 1 ;; esac
    [ -r /dev/kvm ] && [ -w /dev/kvm ] || return 1
    local boot answer=no
    boot=$(cat /proc/sys/kernel/random/boot_id)
    if [ "$(head -n 1 "$cache/kvm" 2>/dev/null)" != "$boot" ]; then
        # In a shell of its own: where it crashes, that is an answer and no news.
        (timeout --foreground -k 1 15 qemu-system-x86_64 -accel kvm -cpu host -m 512M -nographic -no-reboot -nic none \
            -kernel "$root/kernel/vmlinuz" -append "console=ttyS0 panic=-1" </dev/null >"$cache/kvm.log" 2>&1 ||
            true) 2>/dev/null
        grep -aq 'Kernel panic' "$cache/kvm.log" && answer=yes
        printf '%s\n%s\n' "$boot" "$answer" >"$cache/kvm"
    fi
    [ "$(tail -n 1 "$cache/kvm")" = yes ]
}

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
: >"$log"
build_root
fetch_kernel
build_sources
[ $build_only = 0 ] || exit 0
# One thread for all CPUs: with a thread for each, QEMU now and then runs code that the kernel has patched meanwhile,
# and the guest dies of it while it boots ("Oops: int3"). It is no slower here.
accel=(-accel tcg,thread=single -cpu max)
if kvm_works; then accel=(-accel kvm -cpu host); fi

# The initramfs of this run.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
busybox=$root/usr/bin/busybox
mkdir -p "$work/tree/bin" "$work/tree/dev" "$work/tree/proc" "$work/tree/sys" "$work/tree/scratch" "$work/tree/out" "$work/tree/tmp"
cp "$busybox" "$work/tree/bin/busybox"
cp "$root/build/dmnic.ko" "$work/tree/"
cp "$root/kernel/vmlinuz" "$work/"
install -m 755 "$here/guest-init" "$work/tree/init"
install -m 755 "${1:-$root/build/selftest}" "$work/tree/test"
[ $# -gt 0 ] && shift
for file in "${files[@]}"; do cp "$file" "$work/tree/"; done
[ $# -eq 0 ] || printf '%s\n' "$@" >"$work/tree/args"
touch "$work/tree/args"
printf 'MTUS="%s"\nNETNS=%s\nTEST_SECONDS=%s\n' "${mtus//,/ }" "$netns" "$seconds" >"$work/tree/settings"
(cd "$work/tree" && find . | "$busybox" cpio -o -H newc 2>/dev/null | gzip -1) >"$work/initramfs"
flock -u 9

# Only what the guest prints after its start marker is shown; the exit marker gives the status.
count=$(echo "${mtus//,/ }" | wc -w)
timeout --foreground $((60 + count * (seconds + 10))) qemu-system-x86_64 "${accel[@]}" -smp "$cpus" -m "$mem" \
    -display none -serial stdio -serial "file:$work/out" -no-reboot -nic none -kernel "$work/vmlinuz" -initrd "$work/initramfs" \
    -append "console=ttyS0 quiet loglevel=3 oops=panic panic=-1" </dev/null 2>&1 |
    sed -u 's/\r//g' | tee "$work/console" | sed -un '/@devmem-vm-start/,/@devmem-vm-exit/p' || true

status=$(sed -n 's/^@devmem-vm-exit \([0-9]*\)$/\1/p' "$work/console")
if [ -z "$status" ]; then
    echo "devmem VM: it ended without an exit status; its last lines were:" >&2
    tail -n 15 "$work/console" >&2
    exit 125
fi
if [ -n "$out" ]; then
    mkdir -p "$out"
    base64 -d "$work/out" | tar -x -C "$out" --no-same-owner || { echo "devmem VM: no files came back" >&2; exit 125; }
fi
exit "$status"
