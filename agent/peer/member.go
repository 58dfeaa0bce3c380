package peer

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
)

// Fingerprint names a key: SHA-256 of the 32 bytes of an Ed25519 public key.
type Fingerprint [sha256.Size]byte

// FingerprintOf returns the fingerprint of a key.
func FingerprintOf(key ed25519.PublicKey) Fingerprint { return sha256.Sum256(key) }

// String is the fingerprint as it stands on an agent's pod: 64 hexadecimal
// digits, in lower case.
func (f Fingerprint) String() string { return hex.EncodeToString(f[:]) }

// ParseFingerprint reads what String wrote.
func ParseFingerprint(s string) (f Fingerprint, err error) {
	if len(s) != hex.EncodedLen(len(f)) {
		return f, fmt.Errorf("fingerprint %q is not of %d hexadecimal digits", s, hex.EncodedLen(len(f)))
	}
	_, err = hex.Decode(f[:], []byte(s))
	return f, err
}

// Member is the agent of one node, as the rest of the cluster sees it. There is
// one for each node that has an agent that can be reached.
type Member struct {
	Node string
	// Zone may be empty.
	Zone string
	// Address is that of the agent's peer listener.
	Address netip.AddrPort
	// Keys are the keys that speak for the node: in a rollout two agents stand
	// on it for a while. Empty where [Options.Trust] decides.
	Keys []Fingerprint
}

func (m Member) equal(n Member) bool {
	if m.Node != n.Node || m.Zone != n.Zone || m.Address != n.Address || len(m.Keys) != len(n.Keys) {
		return false
	}
	for i := range m.Keys {
		if m.Keys[i] != n.Keys[i] {
			return false
		}
	}
	return true
}
