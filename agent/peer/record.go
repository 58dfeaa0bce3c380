package peer

import (
	"bytes"
	"cmp"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
	"unicode/utf8"
	"unique"

	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/agent/collect"
	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/nodecache"
)

// signedAs stands before a statement where it is signed, so that the key's
// other signatures, those of TLS, can never be taken for one.
const signedAs = "fingerpost.peer.v1.Statement\x00"

type fileHash [sha256.Size]byte

// Record is what one agent says of one owner, signed. It is immutable.
type Record struct {
	key       nodecache.OwnerKey
	node      string
	collected int64 // ms
	signed    int64 // ms
	id        uint64
	print     Fingerprint
	raw       *peerv1.Record
	size      int

	failure *nodecache.Failure // nil: there is an info
	info    *nodecache.Info    // without its files
	files   [][]fileHash       // of each port of info.All
	all     []fileHash         // each once

	verified atomic.Bool // that the signature is good was found out
}

// newer tells whether r takes the place of old, which may be nil: what was
// learned goes before that nothing was, then what was learned later, then what
// was signed later.
func (r *Record) newer(old *Record) bool {
	if old == nil {
		return true
	}
	if fails := r.failure != nil; fails != (old.failure != nil) {
		return !fails
	}
	return cmp.Or(cmp.Compare(r.collected, old.collected), cmp.Compare(r.signed, old.signed), cmp.Compare(r.id, old.id)) > 0
}

// verify tells whether the signature is that of the key.
func (r *Record) verify() bool {
	if r.verified.Load() {
		return true
	}
	ok := ed25519.Verify(r.raw.GetPublicKey(), signedBytes(r.raw.GetStatement()), r.raw.GetSignature())
	if ok {
		r.verified.Store(true)
	}
	return ok
}

func signedBytes(statement []byte) []byte { return append([]byte(signedAs), statement...) }

// sign makes a record of a statement.
func sign(id *Identity, st *peerv1.Statement) (*Record, error) {
	by := id.now.Load()
	raw := &peerv1.Record{PublicKey: by.private.Public().(ed25519.PublicKey)}
	var err error
	if raw.Statement, err = (proto.MarshalOptions{Deterministic: true}).Marshal(st); err != nil {
		return nil, err
	}
	raw.Signature = ed25519.Sign(by.private, signedBytes(raw.GetStatement()))
	if id.Attach {
		raw.Certificate = by.certificate.Certificate[0]
	}
	r, err := decode(raw)
	if err == nil {
		r.verified.Store(true)
	}
	return r, err
}

// state is a statement of what was learned. The files are those of the store.
func state(key nodecache.OwnerKey, node string, info *nodecache.Info, files *fileStore) *peerv1.Statement {
	st := &peerv1.Statement{
		Owner: ownerKey(key), Node: node, CollectedMs: latest(info).UnixMilli(), Pod: info.Pod,
		Images: info.Images, Ports: statePorts(info.Ports, files),
	}
	for _, v := range info.Variants {
		st.Variants = append(st.Variants, &peerv1.Variant{
			Images: v.Images, PodUid: v.Pod, From: v.From, CollectedMs: v.Collected.UnixMilli(), Ports: statePorts(v.Ports, files),
		})
	}
	if proto.Size(st) > maxRecord-4096 {
		lean(st)
	}
	return st
}

// latest is when a pod was last asked of which the info holds the word.
func latest(info *nodecache.Info) time.Time {
	at := info.Collected
	for _, v := range info.Variants {
		if v.Collected.After(at) {
			at = v.Collected
		}
	}
	return at
}

func statePorts(ports []nodecache.PortInfo, files *fileStore) []*peerv1.Port {
	var out []*peerv1.Port
	for _, p := range ports {
		q := &peerv1.Port{Port: uint32(p.Port), State: string(p.State), Detail: line(p.Detail), Linkable: p.Linkable, Hash: p.Hash}
		for _, s := range p.Services {
			q.Services = append(q.Services, &peerv1.Service{Name: s.Name, Methods: s.Methods, Undescribed: s.Undescribed})
		}
		for _, f := range p.Files {
			if len(f.Value()) > maxFile {
				q.Linkable = false
				continue
			}
			h := files.hash(f)
			q.Files = append(q.Files, h[:])
		}
		slices.SortFunc(q.Files, bytes.Compare)
		out = append(out, q)
	}
	return out
}

// lean leaves out what calls can do without.
func lean(st *peerv1.Statement) {
	all := slices.Clone(st.GetPorts())
	for _, v := range st.GetVariants() {
		all = append(all, v.GetPorts()...)
	}
	for _, p := range all {
		p.Linkable, p.Files = false, nil
		for _, s := range p.GetServices() {
			s.Methods, s.Undescribed = nil, true
		}
	}
}

// line is a text for a log: one line, bounded, valid UTF-8, which a message
// needs.
func line(s string) string {
	const most = 512
	if len(s) > most {
		s = s[:most]
	}
	return string(bytes.Map(func(r rune) rune {
		if r < ' ' || r == utf8.RuneError {
			return ' '
		}
		return r
	}, []byte(s)))
}

func ownerKey(k nodecache.OwnerKey) *peerv1.OwnerKey {
	return &peerv1.OwnerKey{Uid: k.UID, Revision: k.Revision}
}

func keyOf(k *peerv1.OwnerKey) nodecache.OwnerKey {
	return nodecache.OwnerKey{UID: k.GetUid(), Revision: k.GetRevision()}
}

// content is a hash of what a statement says, without who says it and when: it
// is equal for equal knowledge on every node.
func content(st *peerv1.Statement) [sha256.Size]byte {
	st = proto.CloneOf(st)
	st.Node, st.Pod, st.CollectedMs, st.SignedMs = "", "", 0, 0
	for _, v := range st.GetVariants() {
		v.From, v.CollectedMs = "", 0
	}
	raw, _ := proto.MarshalOptions{Deterministic: true}.Marshal(st) // it was marshalled before
	return sha256.Sum256(raw)
}

// statement is what the record says.
func (r *Record) statement() *peerv1.Statement {
	var st peerv1.Statement
	_ = proto.Unmarshal(r.raw.GetStatement(), &st) // decode did it before
	return &st
}

// errJunk indicates a record that no agent makes.
var errJunk = errors.New("not a record")

func junk(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errJunk, fmt.Sprintf(format, args...))
}

// decode reads a record, and checks everything of it that needs no knowledge:
// form and bounds. The signature is left to verify, once it is known that the
// key is of interest.
func decode(raw *peerv1.Record) (*Record, error) {
	r := &Record{raw: raw, size: len(raw.GetStatement()) + len(raw.GetCertificate()) + 128}
	if r.size > maxRecord {
		return nil, junk("it has %d bytes", r.size)
	}
	if len(raw.GetPublicKey()) != ed25519.PublicKeySize || len(raw.GetSignature()) != ed25519.SignatureSize {
		return nil, junk("no key or signature")
	}
	var st peerv1.Statement
	if err := proto.Unmarshal(raw.GetStatement(), &st); err != nil {
		return nil, junk("%v", err)
	}
	r.key, r.node, r.collected, r.signed = keyOf(st.GetOwner()), st.GetNode(), st.GetCollectedMs(), st.GetSignedMs()
	if r.key.UID == "" || len(r.key.UID) > maxWord || len(r.key.Revision) > maxWord || r.node == "" || len(r.node) > maxWord {
		return nil, junk("no owner or node")
	}
	r.print = FingerprintOf(raw.GetPublicKey())
	sum := sha256.New()
	sum.Write(raw.GetStatement())
	sum.Write(raw.GetPublicKey())
	r.id = binary.BigEndian.Uint64(sum.Sum(nil))
	if f := st.GetFailure(); f != nil {
		if len(st.GetPorts())+len(st.GetVariants()) > 0 || f.GetReason() != line(f.GetReason()) {
			return nil, junk("a failure with ports, or without a plain reason")
		}
		r.failure = &nodecache.Failure{Reason: f.GetReason(), Next: time.UnixMilli(f.GetNextMs()), Hung: f.GetHung()}
		return r, nil
	}
	r.info = &nodecache.Info{Origin: nodecache.OriginPeer, Collected: time.UnixMilli(r.collected), Pod: st.GetPod()}
	var err error
	if r.info.Ports, err = r.ports(st.GetPorts()); err != nil {
		return nil, err
	}
	if len(st.GetImages()) > nodecache.MaxVariants || len(st.GetVariants()) > nodecache.MaxVariants || len(st.GetPod()) > 2*maxWord {
		return nil, junk("too many images or variants")
	}
	r.info.Images = st.GetImages()
	if !slices.IsSorted(r.info.Images) {
		return nil, junk("images are not sorted")
	}
	for _, v := range st.GetVariants() {
		w := nodecache.Variant{Images: v.GetImages(), Pod: v.GetPodUid(), From: v.GetFrom(), Collected: time.UnixMilli(v.GetCollectedMs())}
		if w.Ports, err = r.ports(v.GetPorts()); err != nil {
			return nil, err
		}
		r.info.Variants = append(r.info.Variants, w)
	}
	for _, fs := range r.files {
		r.all = append(r.all, fs...)
	}
	slices.SortFunc(r.all, func(a, b fileHash) int { return bytes.Compare(a[:], b[:]) })
	r.all = slices.Compact(r.all)
	return r, nil
}

// The bounds of what a pod is asked for (agent/collect) hold for what another
// agent says of it as well.
const (
	maxWord     = 253 // a name of Kubernetes
	maxPorts    = 64
	maxServices = 1024
	maxMethods  = 16384
	maxFiles    = 4096
	maxName     = 512 // of a service or method
)

// ports reads the ports of a statement, and notes their files.
func (r *Record) ports(in []*peerv1.Port) ([]nodecache.PortInfo, error) {
	if len(in) > maxPorts {
		return nil, junk("%d ports", len(in))
	}
	var out []nodecache.PortInfo
	for _, q := range in {
		p := nodecache.PortInfo{
			Port: uint16(q.GetPort()), State: nodecache.PortState(q.GetState()), Detail: q.GetDetail(), Linkable: q.GetLinkable(), Hash: q.GetHash(),
		}
		switch p.State {
		case nodecache.PortServes, nodecache.PortEmpty, nodecache.PortNoReflection, nodecache.PortDenied, nodecache.PortTLS, nodecache.PortNotGRPC:
		default:
			return nil, junk("state %q", p.State)
		}
		switch n := len(out); {
		case q.GetPort() == 0 || q.GetPort() > 65535 || n > 0 && out[n-1].Port >= p.Port:
			return nil, junk("ports are not in order")
		case (len(q.GetServices()) > 0) != (p.State == nodecache.PortServes) || len(q.GetServices()) > maxServices || len(q.GetFiles()) > maxFiles:
			return nil, junk("%d services and %d files on a port that is %s", len(q.GetServices()), len(q.GetFiles()), p.State)
		case p.Detail != line(p.Detail) || len(p.Hash) > 64:
			return nil, junk("a detail of several lines, or a long hash")
		}
		methods := 0
		for i, s := range q.GetServices() {
			if !collect.ValidName(s.GetName()) || len(s.GetName()) > maxName || nodecache.Infrastructure(s.GetName()) {
				return nil, junk("service %q", s.GetName())
			}
			if i > 0 && q.GetServices()[i-1].GetName() >= s.GetName() || !slices.IsSorted(s.GetMethods()) {
				return nil, junk("services or methods are not in order")
			}
			for _, m := range s.GetMethods() {
				if !collect.ValidName(m) || len(m) > maxName {
					return nil, junk("method %q", m)
				}
			}
			if methods += len(s.GetMethods()); methods > maxMethods {
				return nil, junk("more than %d methods", maxMethods)
			}
			p.Services = append(p.Services, nodecache.Service{Name: s.GetName(), Methods: s.GetMethods(), Undescribed: s.GetUndescribed()})
		}
		files := make([]fileHash, 0, len(q.GetFiles()))
		for _, f := range q.GetFiles() {
			if len(f) != len(fileHash{}) {
				return nil, junk("a file's hash of %d bytes", len(f))
			}
			files = append(files, fileHash(f))
		}
		r.files = append(r.files, files)
		out = append(out, p)
	}
	return out, nil
}

// complete is the info with its files, all of which the store must hold.
func (r *Record) complete(files *fileStore) *nodecache.Info {
	if len(r.all) == 0 {
		return r.info
	}
	info := *r.info
	info.Ports = slices.Clone(info.Ports)
	info.Variants = slices.Clone(info.Variants)
	for n := range info.Variants {
		info.Variants[n].Ports = slices.Clone(info.Variants[n].Ports)
	}
	n := 0
	for p := range info.All() {
		for _, h := range r.files[n] {
			p.Files = append(p.Files, files.get(h))
		}
		slices.SortFunc(p.Files, func(a, b unique.Handle[string]) int { return cmp.Compare(a.Value(), b.Value()) })
		n++
	}
	return &info
}
