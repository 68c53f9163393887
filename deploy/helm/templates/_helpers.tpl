{{- define "pdmesh.labels" -}}
app.kubernetes.io/name: pdmesh
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pdmesh.pod" -}}
enableServiceLinks: false # else Kubernetes sets variables that look like settings
shareProcessNamespace: true # else the service is process 1: an abort ends that with another signal, and orphans stay
terminationGracePeriodSeconds: {{ add .Values.drainSeconds 10 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
tolerations:
  - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: {{ .Values.unreachableSeconds }}}
  - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: {{ .Values.unreachableSeconds }}}
{{- with .Values.tolerations }}
{{ toYaml . | indent 2 }}
{{- end }}
volumes:
  - name: tmp
    emptyDir: {}
{{- if .Values.secretName }}
  - name: settings
    secret: {secretName: {{ .Values.secretName }}, defaultMode: 0440}
{{- end }}
{{- if .Values.tls.secretName }}
  - name: tls
    secret: {secretName: {{ .Values.tls.secretName }}, defaultMode: 0440}
{{- end }}
{{- with .Values.modelVolume }}
  - name: models
{{ toYaml . | indent 4 }}
{{- end }}
{{- end }}

{{- define "pdmesh.container" -}}
image: {{ .Values.image }}
imagePullPolicy: {{ .Values.imagePullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
{{- if .Values.secretName }}
  - {name: settings, mountPath: /etc/pdmesh, readOnly: true}
{{- end }}
{{- if .Values.tls.secretName }}
  - {name: tls, mountPath: /etc/pdmesh-tls, readOnly: true}
{{- end }}
{{- if .Values.modelVolume }}
  - {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "pdmesh.env" -}}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: /tmp/huggingface}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: PDMESH_SCHEDULER_ADDRESS, value: {{ include "pdmesh.schedulers" . | quote }}}
- {name: PDMESH_DRAIN_S, value: {{ .Values.drainSeconds | quote }}}
- {name: PDMESH_TELEMETRY_METRICS_HOST, value: "0.0.0.0"}
{{- if .Values.secretName }}
- {name: PDMESH_CONFIG, value: /etc/pdmesh/pdmesh.toml}
{{- end }}
{{- if .Values.tls.secretName }}
- {name: PDMESH_SECURITY_TLS_CERT, value: /etc/pdmesh-tls/tls.crt}
- {name: PDMESH_SECURITY_TLS_KEY, value: /etc/pdmesh-tls/tls.key}
- {name: PDMESH_SECURITY_TLS_CA, value: /etc/pdmesh-tls/ca.crt}
- {name: PDMESH_SECURITY_TLS_SERVER_NAME, value: {{ required "set tls.serverName to a name of the certificate" .Values.tls.serverName | quote }}}
{{- else if .Values.trustedNetwork }}
- {name: PDMESH_SECURITY_TRUSTED_NETWORK, value: "true"}
{{- else }}
{{- fail "set tls.secretName to a Secret with tls.crt, tls.key and ca.crt, or say trustedNetwork=true" }}
{{- end }}
{{- range $name, $value := .Values.settings }}
- {name: PDMESH_{{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "pdmesh.scheme" -}}
{{ empty .Values.tls.secretName | ternary "HTTP" "HTTPS" }}
{{- end }}

{{- /* Given a port: a probe that waits for an answer, because a process that hangs still accepts connections. */}}
{{- define "pdmesh.live" -}}
httpGet: {path: /live, port: {{ .port }}, scheme: {{ include "pdmesh.scheme" .root }}}
timeoutSeconds: 6
{{- end }}

{{- /* The process is ended after a minute without an answer: on a busy machine answers are late. */}}
{{- define "pdmesh.liveness" -}}
{{ include "pdmesh.live" . }}
periodSeconds: 10
failureThreshold: 6
{{- end }}

{{- /* Given a port: how Prometheus finds a pod's metrics, by the annotations that its usual jobs know. */}}
{{- define "pdmesh.scrape" -}}
{prometheus.io/scrape: "true", prometheus.io/port: {{ .port | quote }}, prometheus.io/scheme: {{ include "pdmesh.scheme" .root | lower }}}
{{- end }}

{{- /* Given a label: pods of it are on different nodes where that can be. */}}
{{- define "pdmesh.apart" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 1
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "pdmesh.labels" .root | nindent 12 }}
            {{ .label }}: {{ .value }}
{{- end }}

{{- define "pdmesh.model" -}}
{{- with .Values.model }}
- {name: PDMESH_MODEL, value: {{ . | quote }}}
{{- end }}
{{- end }}

{{- define "pdmesh.schedulers" -}}
{{- $name := printf "%s-scheduler" .Release.Name }}
{{- if gt (int .Values.scheduler.replicas) 1 }}
{{- $addresses := list }}
{{- range $number := until (int .Values.scheduler.replicas) }}
{{- $addresses = append $addresses (printf "%s-%d.%s:7000" $name $number $name) }}
{{- end }}
{{- join "," $addresses }}
{{- else }}
{{- printf "%s:7000" $name }}
{{- end }}
{{- end }}
