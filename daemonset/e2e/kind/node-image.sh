#!/bin/bash
# Makes a node image for kind, as kind's own build does, from Debian's packages
# and Go modules alone: no registry is asked. cluster.sh calls it.
#
#	node-image.sh IMAGE
set -euo pipefail
image=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../../.." && pwd)
root=$KIND_DIR/debian # the Debian system that nodes are made of

say() { printf '%s kind: %s\n' "$(date +%T)" "$*" >&2; }
tool() { (cd "$repository" && go run ./tools/bring -path "$1"); }

work=$(mktemp -d "$KIND_DIR/image.XXXXXX")
builder=fingerpost-node-$$
trap 'docker rm -fv "$builder" >/dev/null 2>&1 || true; rm -rf "$work"' EXIT

if [ ! -e "$root/.complete" ]; then
	say "Debian bookworm into $root"
	rm -rf "$root"
	debootstrap --variant=minbase --include=systemd,dbus,conntrack,iptables,nftables,iproute2,ethtool,util-linux,mount,kmod,libseccomp2,pigz,e2fsprogs,bash,ca-certificates,curl,jq,procps,socat,iputils-ping \
		bookworm "$root" >"$KIND_DIR/debootstrap.log" 2>&1
	touch "$root/.complete"
fi

go_program() { (cd "$repository" && CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$2" "./daemonset/e2e/kind/$1"); }

# place FILE ROOT PATH: a program with the libraries that it needs, of Debian's
place() {
	local library
	install -D -m 755 "$1" "$2/$3"
	# A program of the Debian system is named as seen from within. The others
	# are static and need none.
	{ chroot "$root" ldd "${1#"$root"}" 2>/dev/null || true; } | { grep -oE '/[^ ]+' || true; } | sort -u |
		while read -r library; do
			[ -e "$2$library" ] || { mkdir -p "$2$(dirname "$library")" && cp -L "$root$library" "$2$library"; }
		done
}

images=()
# pack NAME ROOT ENTRYPOINT: an image of what is below ROOT
pack() {
	mkdir -p "$2/tmp" "$2/etc"
	chmod 1777 "$2/tmp"
	tar -C "$2" --owner=0 --group=0 -c . |
		docker import --change 'ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' --change "ENTRYPOINT $3" - "$1" >/dev/null
	images+=("$1")
	rm -rf "$2"
}

say "images of the control plane"
kubernetes=$("$(tool kubeadm)" version -o short)
list=$("$(tool kubeadm)" config images list --kubernetes-version "$kubernetes" 2>/dev/null)
named() { grep -E "/$1:" <<<"$list"; }
kind_source=$(go -C "$repository/tools/kind" list -m -f '{{.Dir}}' sigs.k8s.io/kind)/images/base/files

for program in kube-apiserver kube-controller-manager kube-scheduler etcd; do
	place "$(tool $program)" "$work/one" "usr/local/bin/$program"
	pack "$(named $program)" "$work/one" '[]'
done
place "$(tool coredns)" "$work/one" coredns
pack "$(named coredns)" "$work/one" '["/coredns"]'
go_program pause "$work/pause"
place "$work/pause" "$work/one" pause
pack "$(grep -oE 'registry.k8s.io/pause:[0-9.]+' "$kind_source/etc/containerd/config.toml")" "$work/one" '["/pause"]'

# kube-proxy and the pods' network call iptables and ip.
network_root() {
	local program name
	mkdir -p "$1"/{run,usr/sbin,usr/bin,usr/lib/x86_64-linux-gnu}
	ln -s usr/sbin "$1/sbin"
	ln -s usr/bin "$1/bin"
	for program in usr/sbin/xtables-nft-multi usr/sbin/nft usr/sbin/conntrack usr/bin/ip usr/bin/kmod usr/bin/dash usr/bin/cat; do
		place "$root/$program" "$1" "$program"
	done
	for program in "$root"/usr/lib/x86_64-linux-gnu/xtables/*.so; do
		place "$program" "$1" "${program#"$root/"}"
	done
	for name in iptables ip6tables; do
		ln -s xtables-nft-multi "$1/usr/sbin/$name"
		ln -s xtables-nft-multi "$1/usr/sbin/$name-save"
		ln -s xtables-nft-multi "$1/usr/sbin/$name-restore"
	done
	ln -s ../bin/kmod "$1/usr/sbin/modprobe"
	ln -s dash "$1/usr/bin/sh"
}
network_root "$work/one"
place "$(tool kube-proxy)" "$work/one" usr/local/bin/kube-proxy
pack "$(named kube-proxy)" "$work/one" '[]'
network_root "$work/one"
go_program network "$work/network"
place "$work/network" "$work/one" usr/local/bin/network
pack localhost/fingerpost-network:v1 "$work/one" '["/usr/local/bin/network"]'
docker save -o "$work/images.tar" "${images[@]}"

say "the node's system"
node=$work/node
cp -a "$root" "$node"
rm -rf "$node"/.complete "$node"/var/cache/apt/archives/*.deb "$node"/var/cache/apt/*.bin "$node"/var/lib/apt/lists/* \
	"$node"/usr/share/{doc,man,locale}/* "$node"/var/log/*.log
copy() { # copy MODE PATTERN...: of kind's own files
	local mode=$1 file
	shift
	for file; do install -D -m "$mode" "$file" "$node/${file#"$kind_source/"}"; done
}
copy 755 "$kind_source"/usr/local/bin/* "$kind_source"/kind/bin/*
copy 644 "$kind_source"/etc/crictl.yaml "$kind_source"/etc/containerd/* "$kind_source"/etc/default/* "$kind_source"/etc/sysctl.d/* \
	"$kind_source"/etc/systemd/system/*.service "$kind_source"/etc/systemd/system/*.slice "$kind_source"/etc/systemd/system/kubelet.service.d/*
for program in containerd ctr containerd-shim-runc-v2 crictl; do install -m 755 "$(tool $program)" "$node/usr/local/bin/"; done
install -D -m 755 "$(tool runc)" "$node/usr/local/sbin/runc"
for program in host-local loopback ptp portmap; do install -D -m 755 "$(tool $program)" "$node/opt/cni/bin/$program"; done
for program in kubeadm kubelet kubectl; do install -m 755 "$(tool $program)" "$node/usr/bin/"; done
mkdir -p "$node"/kind/manifests "$node"/etc/kubernetes/manifests "$node"/var/lib/kubelet
install -m 644 "$here/cni.yaml" "$node/kind/manifests/default-cni.yaml"
install -m 644 "$here/storage.yaml" "$node/kind/manifests/default-storage.yaml"
printf %s "$kubernetes" >"$node/kind/version"
# Without CAP_SYS_RESOURCE no score can be lowered; kind does the same where it
# runs without root.
sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' "$node/etc/containerd/config.toml"
# What kind's own image does with its system: no unit but those of a node.
chroot "$node" /bin/bash -euc '
	find /lib/systemd/system/sysinit.target.wants/ -name systemd-tmpfiles-setup.service -delete
	rm -f /lib/systemd/system/multi-user.target.wants/* /etc/systemd/system/*.wants/* /lib/systemd/system/local-fs.target.wants/* \
		/lib/systemd/system/sockets.target.wants/*udev* /lib/systemd/system/sockets.target.wants/*initctl* /lib/systemd/system/basic.target.wants/*
	echo ReadKMsg=no >>/etc/systemd/journald.conf
	ln -sf /usr/lib/systemd/systemd /sbin/init
	systemctl enable kubelet.service containerd.service undo-mount-hacks.service
	systemctl mask systemd-binfmt.service
	ctr oci spec | jq ".hooks.createContainer += [{path: \"/kind/bin/mount-product-files.sh\"}] | del(.process.rlimits)" >/etc/containerd/cri-base.json
	containerd --version; runc --version; crictl --version' >&2

say "the images into the node's containerd"
entrypoint='ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]'
tar -C "$node" --one-file-system -c . | docker import --change 'ENV container=docker' \
	--change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' --change "$entrypoint" - "$builder" >/dev/null
docker run -d --name "$builder" --security-opt seccomp=unconfined --network none --entrypoint sleep -v "$work:/in:ro" "$builder" infinity >/dev/null
docker exec "$builder" bash -euc '
	containerd >/tmp/log 2>&1 &
	for ((i = 0; i < 50; i++)); do ctr version >/dev/null 2>&1 && break; sleep 0.2; done
	ctr -n k8s.io images import --label io.cri-containerd.pinned=pinned --all-platforms --no-unpack --digests /in/images.tar >/dev/null
	ctr -n k8s.io images list -q
	kill %1; wait %1 || true
	rm /tmp/log' >&2
docker commit --change "$entrypoint" "$builder" "$image" >/dev/null
docker rm -fv "$builder" >/dev/null
docker image rm "$builder" "${images[@]}" >/dev/null
say "made $image"
