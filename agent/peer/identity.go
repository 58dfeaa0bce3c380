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
	"time"
)

// Identity is what an agent shows to others: a TLS certificate, and the key by
// which it signs what it says. It is immutable.
type Identity struct {
	Certificate tls.Certificate
	// Attach puts the certificate into every record: others do not know the
	// key's fingerprint from the agent's pod, and [Options.Trust] needs it.
	Attach bool

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
	private, ok := c.PrivateKey.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("the key is a %T, and peers sign with Ed25519: make one with openssl genpkey -algorithm ed25519", c.PrivateKey)
	}
	if len(c.Certificate) == 0 {
		return nil, errors.New("there is no certificate")
	}
	id := &Identity{Certificate: c, private: private}
	id.fingerprint = FingerprintOf(private.Public().(ed25519.PublicKey))
	return id, nil
}

// Fingerprint is that of the key, which others have to find on the agent's pod.
func (id *Identity) Fingerprint() Fingerprint { return id.fingerprint }
