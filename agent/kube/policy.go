package kube

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// The annotations by which a workload says what it wants of calls to it, on its
// pods, and on a Service that declares what it serves.
const (
	RetryOnAnnotation        = "fingerpost.dev/retry-on"
	NumRetriesAnnotation     = "fingerpost.dev/num-retries"
	RetryBudgetAnnotation    = "fingerpost.dev/retry-budget"
	MaxRequestsAnnotation    = "fingerpost.dev/max-requests"
	ConnectTimeoutAnnotation = "fingerpost.dev/connect-timeout"
	KeepaliveAnnotation      = "fingerpost.dev/keepalive-interval"
	OutlierAnnotation        = "fingerpost.dev/outlier-detection"
)

// policyWords are these annotations, and how each is read: into the policy, or
// with an error that leaves it as it was.
var policyWords = [...]struct {
	annotation string
	read       func(*nodecache.Policy, string) error
}{
	{RetryOnAnnotation, func(p *nodecache.Policy, text string) (err error) {
		p.RetryOn, err = parseRetryOn(text)
		return err
	}},
	{NumRetriesAnnotation, func(p *nodecache.Policy, text string) error {
		n, err := parseCount(text, 0, 10)
		p.Retries, p.NoRetries = n, err == nil && n == 0
		return err
	}},
	{RetryBudgetAnnotation, func(p *nodecache.Policy, text string) (err error) {
		p.RetryBudget, err = parseCount(strings.TrimSuffix(text, "%"), 1, 100)
		return err
	}},
	{MaxRequestsAnnotation, func(p *nodecache.Policy, text string) (err error) {
		p.MaxRequests, err = parseCount(text, 1, math.MaxUint32)
		return err
	}},
	{ConnectTimeoutAnnotation, func(p *nodecache.Policy, text string) (err error) {
		p.ConnectTimeout, err = parseDuration(text, time.Millisecond, time.Minute)
		return err
	}},
	{KeepaliveAnnotation, func(p *nodecache.Policy, text string) (err error) {
		p.Keepalive, err = parseDuration(text, time.Second, time.Hour)
		return err
	}},
	{OutlierAnnotation, func(p *nodecache.Policy, text string) (err error) {
		if text == "off" {
			p.NoOutliers = true
			return nil
		}
		if p.OutlierFailures, err = parseCount(text, 1, 1000); err != nil {
			return errors.New(`it is neither "off" nor a number of failures from 1 to 1000`)
		}
		return nil
	}},
}

// policyTexts are the values of policyWords, in their order.
type policyTexts [len(policyWords)]annotation

// see takes an annotation that is one of them.
func (t *policyTexts) see(key, value string) {
	for i := range policyWords {
		if policyWords[i].annotation == key {
			t[i] = annotation{value, true}
		}
	}
}

// append writes them into a template's key, and read reads them: one byte where
// nothing is said, as of most pods.
func (t *policyTexts) append(b []byte) []byte {
	said := 0
	for _, a := range t {
		if a.there {
			said++
		}
	}
	b = binary.AppendUvarint(b, uint64(said))
	for i, a := range t {
		if a.there {
			b = appendText(binary.AppendUvarint(b, uint64(i)), a.value)
		}
	}
	return b
}

func (t *policyTexts) read(r *reader) {
	for range r.count() {
		i, value := r.uvarint(), r.text()
		if i >= uint64(len(t)) {
			r.fail()
			return
		}
		t[i] = annotation{value, true}
	}
}

// parsePolicy reads what is said; nil where that is nothing. Each annotation
// counts alone: one that makes no sense is ignored, and the rest holds.
func parsePolicy(texts *policyTexts) (p *nodecache.Policy, ignore []string) {
	var said nodecache.Policy
	for i, a := range texts {
		if !a.there {
			continue
		}
		if err := policyWords[i].read(&said, strings.TrimSpace(a.value)); err != nil {
			ignore = append(ignore, ignored(policyWords[i].annotation, a.value, err.Error()))
		}
	}
	if said == (nodecache.Policy{}) {
		return nil, ignore
	}
	return &said, ignore
}

// retryConditions are those of Envoy that make sense of a gRPC call.
var retryConditions = []string{
	"connect-failure", "refused-stream", "reset-before-request", "reset",
	"cancelled", "deadline-exceeded", "internal", "resource-exhausted", "unavailable",
}

func parseRetryOn(text string) (string, error) {
	var on []string
	for word := range strings.SplitSeq(text, ",") {
		i := slices.Index(retryConditions, strings.TrimSpace(word))
		if i < 0 {
			return "", fmt.Errorf("%q is none of %s", strings.TrimSpace(word), strings.Join(retryConditions, ", "))
		}
		on = append(on, retryConditions[i])
	}
	slices.Sort(on)
	return strings.Join(slices.Compact(on), ","), nil
}

func parseCount(text string, least, most uint32) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || uint32(n) < least || uint32(n) > most {
		return 0, fmt.Errorf("it is not a number from %d to %d", least, most)
	}
	return uint32(n), nil
}

func parseDuration(text string, least, most time.Duration) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil || d < least || d > most {
		return 0, fmt.Errorf("it is not a duration from %s to %s, as 1.5s", least, most)
	}
	return d, nil
}
