{{- define "lmcache-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The release's name, with the chart's name if the release's name does not contain it. */}}
{{- define "lmcache-operator.fullname" -}}
{{- $name := include "lmcache-operator.name" . }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- default $full .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Name of an object outside the release's namespace. Namespaces have no dots, so two releases never share a name. */}}
{{- define "lmcache-operator.outsideName" -}}
{{ include "lmcache-operator.fullname" . }}.{{ .Release.Namespace }}
{{- end }}

{{- define "lmcache-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "lmcache-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lmcache-operator.labels" -}}
{{ include "lmcache-operator.selectorLabels" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: lmcache-cluster
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "lmcache-operator.monitoringLabels" -}}
{{- include "lmcache-operator.labels" . }}
{{- with .Values.monitoring.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "lmcache-operator.serviceAccountName" -}}
{{- $default := ternary (include "lmcache-operator.fullname" .) "default" .Values.serviceAccount.create }}
{{- default $default .Values.serviceAccount.name }}
{{- end }}

{{- define "lmcache-operator.image" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag }}
{{- with .Values.image.digest }}{{ $.Values.image.repository }}@{{ . }}{{ else }}{{ .Values.image.repository }}:{{ $tag }}{{ end }}
{{- end }}

{{/* Fails before Helm creates any object. `helm template` has no cluster, so it skips this check. */}}
{{- define "lmcache-operator.checkNamespaces" -}}
{{- if lookup "v1" "Namespace" "" "kube-system" }}
{{- range .Values.watchNamespaces }}
{{- if not (lookup "v1" "Namespace" "" .) }}
{{- fail (printf "watchNamespaces: there is no namespace %q: create it first (kubectl create namespace %s)" . .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Fails if the operator of another release serves the same namespaces, or if that release owns the CRDs. */}}
{{- define "lmcache-operator.checkReleases" -}}
{{- $problems := list }}
{{- $crd := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "lmcacheclusters.lmcache.io" }}
{{- $owner := dig "metadata" "annotations" dict $crd }}
{{- range (lookup "rbac.authorization.k8s.io/v1" "ClusterRole" "" "").items }}
{{- $labels := .metadata.labels | default dict }}
{{- $release := get $labels "app.kubernetes.io/instance" }}
{{- $namespace := dig "annotations" "meta.helm.sh/release-namespace" (splitList "." .metadata.name | last) .metadata }}
{{- if and (eq (get $labels "app.kubernetes.io/part-of") "lmcache-cluster") (ne (list $release $namespace | join "/") (list $.Release.Name $.Release.Namespace | join "/")) }}
{{- range (lookup "apps/v1" "Deployment" $namespace "").items }}
{{- $labels = .metadata.labels | default dict }}
{{- if and (eq (get $labels "app.kubernetes.io/instance") $release) (eq (get $labels "app.kubernetes.io/part-of") "lmcache-cluster") }}
{{- $served := list }}
{{- range (first .spec.template.spec.containers).args }}
{{- if hasPrefix "--namespace=" . }}{{ $served = append $served (trimPrefix "--namespace=" .) }}{{ end }}
{{- end }}
{{- $common := $.Values.watchNamespaces | default $served }}
{{- range $common }}
{{- if and $served (not (has . $served)) }}{{ $common = without $common . }}{{ end }}
{{- end }}
{{- if or $common (not $served) }}
{{- $what := ternary (printf "namespace %s" (join ", " $common)) "all namespaces" (not (empty $served)) }}
{{- $problems = append $problems (printf "watchNamespaces: the operator of release %s in namespace %s serves %s already, and only one operator may serve a namespace. Uninstall that release (helm uninstall %s -n %s), or set watchNamespaces in both releases to different namespaces." $release $namespace $what $release $namespace) }}
{{- end }}
{{- if and $.Values.crds.enabled (eq (get $owner "meta.helm.sh/release-name") $release) (eq (get $owner "meta.helm.sh/release-namespace") $namespace) }}
{{- $problems = append $problems (printf "crds.enabled: the CRDs belong to release %s in namespace %s. While it is installed, set crds.enabled=false in this release, and do not use --take-ownership." $release $namespace) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if $problems }}{{ fail (join "\n" $problems) }}{{ end }}
{{- end }}

{{/* The namespaces to which an admission policy applies; empty: all. */}}
{{- define "lmcache-operator.servedNamespaces" -}}
{{- with .Values.watchNamespaces -}}
namespaceSelector:
  matchExpressions:
    - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson . }}}
{{- end }}
{{- end }}

{{/* The API version of MutatingAdmissionPolicy; empty: do not install the policy. */}}
{{- define "lmcache-operator.policyVersion" -}}
{{- $group := "admissionregistration.k8s.io" }}
{{- if eq (toString .Values.injection.enabled) "false" }}
{{- else if .Capabilities.APIVersions.Has (printf "%s/v1/MutatingAdmissionPolicy" $group) }}v1
{{- else if .Capabilities.APIVersions.Has (printf "%s/v1beta1/MutatingAdmissionPolicy" $group) }}v1beta1
{{- else if eq (toString .Values.injection.enabled) "true" }}
{{- fail "injection.enabled: the API server has no MutatingAdmissionPolicy. You need Kubernetes 1.36, or 1.34 with the feature gate MutatingAdmissionPolicy and --runtime-config=admissionregistration.k8s.io/v1beta1=true" }}
{{- end }}
{{- end }}

{{/* Permissions on namespaced objects, for a Role in one namespace or a ClusterRole in all. */}}
{{- define "lmcache-operator.rules" -}}
# The operator writes only LMCacheClusters of prefill pods. RBAC can't tell them from others.
- apiGroups: [lmcache.io]
  resources: [lmcacheclusters]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [lmcache.io]
  resources: [lmcacheclusters/status]
  verbs: [patch]
# Required for owner references that block deletion, if the admission plugin for them is on (OpenShift).
- apiGroups: [lmcache.io]
  resources: [lmcacheclusters/finalizers]
  verbs: [update]
# Children of clusters: the kinds of the operator's components (kinds_of in lmcache_operator/components).
# The operator also deletes these, when the spec no longer has a managed remote tier or a router.
- apiGroups: [""]
  resources: [serviceaccounts, configmaps, services]
  verbs: [get, list, watch, create, patch, delete]
# Random passwords and tokens of an LMCacheCluster. The operator creates these Secrets and never reads them.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [lmcache.io]
  resources: [lmcacheprofiles]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [statefulsets, deployments]
  verbs: [get, list, watch, create, patch, delete]
# Each router gets a Role to list and watch pods. Kubernetes lets the operator grant only rights that it has itself.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# Certificates of managed remote tiers and of peers with an issuer. They need cert-manager.
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [get, list, watch, create, patch, delete]
# A claim template is immutable, so the operator deletes it and creates it again.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, watch, create, patch, delete]
# Engines over several nodes, in clusters that serve this API.
- apiGroups: [scheduling.k8s.io]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
# The operator deletes pods of lost nodes by force. It sets the memory tier's size as an annotation of running pods.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  resources: [pods/resize]
  verbs: [patch]
# The operator reads from Events why pods are missing or not ready, and reports changes of clusters as Events.
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
# The operator creates no objects in a namespace that is terminating.
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]
# Operators of several releases agree on who serves the namespace. A rule cannot name an object that does not exist yet.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [lmcache-operator-namespace]
  verbs: [get, update]
{{- end }}
