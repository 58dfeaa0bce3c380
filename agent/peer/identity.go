package peer

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"sync/atomic"
	"time"
)

// Identity is what an agent shows to others: a TLS certificate, and the key by
// which it signs what it says. It is safe for concurrent use.
type Identity struct {
	// Attach puts the certificate into every record: others do not know the
	// key's fingerprint from the agent's pod, and [Options.Trust] needs it. It is
	// set at creation and read-only.
	Attach bool

	now atomic.Pointer[showing]
}

// showing is what is shown at one moment. It is immutable.
type showing struct {
	certificate tls.Certificate
	private     ed25519.PrivateKey
	fingerprint Fingerprint
}

// NewIdentity makes a key and a certificate for it that nobody else signed. It
// says nothing by itself: others know the agent by the key's fingerprint.
func NewIdentity(node string) (*Identity, error) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()),
		Subject:      pkix.Name{CommonName: node},
		// Nobody looks at these: a fingerprint ends with the pod that has it,
		// and the clocks of nodes differ.
		NotBefore:   now.Add(-24 * time.Hour),
		NotAfter:    now.AddDate(10, 0, 0),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, private)
	if err != nil {
		return nil, err
	}
	return IdentityOf(tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private})
}

// IdentityOf is the identity of a certificate with its key, which has to be an
// Ed25519 key.
func IdentityOf(c tls.Certificate) (*Identity, error) {
	id := &Identity{}
	return id, id.Renew(c)
}

// Renew exchanges the certificate, and the key with it: for what is signed and
// for connections that are made from now on. The error is that of IdentityOf.
func (id *Identity) Renew(c tls.Certificate) error {
	private, ok := c.PrivateKey.(ed25519.PrivateKey)
	if !ok {
		return fmt.Errorf("the key is a %T, and peers sign with Ed25519: make one with openssl genpkey -algorithm ed25519", c.PrivateKey)
	}
	if len(c.Certificate) == 0 {
		return errors.New("there is no certificate")
	}
	id.now.Store(&showing{c, private, FingerprintOf(private.Public().(ed25519.PublicKey))})
	return nil
}

// Certificate is that of the moment.
func (id *Identity) Certificate() *tls.Certificate { return &id.now.Load().certificate }

// Fingerprint is that of the key, which others have to find on the agent's pod.
func (id *Identity) Fingerprint() Fingerprint { return id.now.Load().fingerprint }
