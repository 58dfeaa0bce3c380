package peer

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// The files of a directory of certificates, by the names that Secrets of the type
// kubernetes.io/tls have.
const (
	certificateFile = "tls.crt"
	keyFile         = "tls.key"
	authorityFile   = "ca.crt"
)

// nodeScheme and nodeHost begin the URI by which a certificate names its node:
// fingerpost://node/NODE.
const (
	nodeScheme = "fingerpost"
	nodeHost   = "node"
)

// certificatesEvery is how often it is looked whether the files are as they were.
// A Secret that changed is on the node after a minute.
const certificatesEvery = 10 * time.Second

// maxTrusted bounds the certificates that are remembered as good.
const maxTrusted = 16384

// Certificates are those of a directory: who this agent is, and whom it believes.
// A certificate speaks for the node that it names by the URI fingerpost://node/NODE
// among its alternative names, if ca.crt leads to it. Its methods are safe for
// concurrent use.
type Certificates struct {
	dir, node string
	identity  *Identity

	// mu guards what follows.
	mu      sync.Mutex
	sum     [sha256.Size]byte // of the files that are in use
	roots   *x509.CertPool
	trusted map[[sha256.Size]byte]trusted // by the certificate
	err     error
}

type trusted struct {
	key   Fingerprint
	node  string
	until time.Time
}

// LoadCertificates reads tls.crt, tls.key and ca.crt in the directory. The error,
// of one line, names the file and says what it lacks.
func LoadCertificates(dir, node string) (*Certificates, error) {
	c := &Certificates{dir: dir, node: node}
	if err := c.load(); err != nil {
		return nil, err
	}
	return c, nil
}

// Identity is that of the agent itself. It is renewed with the files.
func (c *Certificates) Identity() *Identity { return c.identity }

// Err says why the files of now are not in use; nil if they are.
func (c *Certificates) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Watch uses files that changed, until ctx ends. A nil log discards.
func (c *Certificates) Watch(ctx context.Context, log *slog.Logger) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	tick := time.NewTicker(certificatesEvery)
	defer tick.Stop()
	told := ""
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		err := c.load()
		c.mu.Lock()
		c.err = err
		c.mu.Unlock()
		switch {
		case err == nil:
			told = ""
		case told != err.Error():
			told = err.Error()
			log.Warn("certificates of peers cannot be used; those of before are", "error", err)
		}
	}
}

// load uses the files, if they are others than those in use.
func (c *Certificates) load() error {
	var content [3][]byte
	hash := sha256.New()
	for i, name := range [...]string{certificateFile, keyFile, authorityFile} {
		var err error
		if content[i], err = os.ReadFile(filepath.Join(c.dir, name)); err != nil {
			return err
		}
		sum := sha256.Sum256(content[i])
		hash.Write(sum[:])
	}
	sum := [sha256.Size]byte(hash.Sum(nil))
	c.mu.Lock()
	same := c.roots != nil && c.sum == sum
	c.mu.Unlock()
	if same {
		return nil
	}
	pair, err := tls.X509KeyPair(content[0], content[1])
	if err != nil {
		return fmt.Errorf("%s and %s in %s: %w", certificateFile, keyFile, c.dir, err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(content[2]) {
		return fmt.Errorf("%s in %s has no certificate in PEM", authorityFile, c.dir)
	}
	in := fmt.Sprintf("%s in %s", certificateFile, c.dir)
	if node, _, err := verify(roots, pair.Certificate[0]); err != nil {
		return fmt.Errorf("%s: other agents would refuse it: %w", in, err)
	} else if node != c.node {
		return fmt.Errorf("%s is for node %q, and this agent is on %q", in, node, c.node)
	}
	if c.identity == nil {
		if c.identity, err = IdentityOf(pair); err == nil {
			c.identity.Attach = true
		}
	} else {
		err = c.identity.Renew(pair)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", in, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sum, c.roots, c.trusted = sum, roots, map[[sha256.Size]byte]trusted{}
	return nil
}

// Trust is that of [Options].
func (c *Certificates) Trust(key Fingerprint, certificate []byte) (node string, ok bool) {
	if len(certificate) == 0 {
		return "", false
	}
	sum := sha256.Sum256(certificate)
	c.mu.Lock()
	roots := c.roots
	t, known := c.trusted[sum]
	c.mu.Unlock()
	if !known {
		var err error
		var leaf *x509.Certificate
		if t.node, leaf, err = verify(roots, certificate); err != nil {
			return "", false
		}
		public, _ := leaf.PublicKey.(ed25519.PublicKey) // verify has seen it
		t.key, t.until = FingerprintOf(public), leaf.NotAfter
		c.mu.Lock()
		if c.roots == roots {
			if len(c.trusted) >= maxTrusted {
				clear(c.trusted)
			}
			c.trusted[sum] = t
		}
		c.mu.Unlock()
	}
	if t.key != key || time.Now().After(t.until) {
		return "", false
	}
	return t.node, true
}

// verify returns the node that a certificate speaks for. Certificates between it
// and the roots are not sent along, so that ca.crt has to hold the one that signed
// it.
func verify(roots *x509.CertPool, der []byte) (string, *x509.Certificate, error) {
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return "", nil, err
	}
	if _, is := leaf.PublicKey.(ed25519.PublicKey); !is {
		return "", nil, fmt.Errorf("its key is %v, and peers sign with Ed25519: make one with openssl genpkey -algorithm ed25519", leaf.PublicKeyAlgorithm)
	}
	if leaf.IsCA {
		return "", nil, errors.New("it is an authority's")
	}
	node := ""
	for _, u := range leaf.URIs {
		n, is := nodeOf(u)
		if !is {
			continue
		}
		if node != "" {
			return "", nil, errors.New("it names two nodes")
		}
		node = n
	}
	if node == "" {
		return "", nil, fmt.Errorf("it names no node: give it the alternative name URI:%s://%s/NODE", nodeScheme, nodeHost)
	}
	for _, usage := range [...]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
		if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{usage}}); err != nil {
			return "", nil, err
		}
	}
	return node, leaf, nil
}

func nodeOf(u *url.URL) (string, bool) {
	if u.Scheme != nodeScheme || u.Host != nodeHost || len(u.Path) < 2 || u.RawQuery != "" || u.Fragment != "" {
		return "", false
	}
	return u.Path[1:], true
}
